"""A table's own partition, simulated: every invariant holds in the first seeds."""

from __future__ import annotations

import pytest

from tests.cases import each_case
from tests.simulation.shrink import report
from tests.simulation.table.run import run, run_seed

SEEDS = 300


@pytest.mark.timeout(300)  # of a machine with much else to do; alone, it takes 9 s
def test_every_invariant_holds() -> None:
    """And runs are dense: most change leaders and fill logs, few lose a partition in memory with all its replicas."""
    outcomes = [run_seed(seed) for seed in range(SEEDS)]
    broken = [outcome for outcome in outcomes if outcome.broken is not None]
    assert not broken, "\n".join(report(outcome, run, "make simulate TABLE=1") for outcome in broken[:3])
    assert sum(outcome.epochs for outcome in outcomes) > 4 * SEEDS
    assert sum(outcome.commands for outcome in outcomes) > 40 * SEEDS
    assert sum(outcome.lost for outcome in outcomes) < 0.05 * SEEDS
    assert {outcome.plan.durable for outcome in outcomes} == {True, False}


@each_case("seed", [3, 17])
def test_a_run_is_its_seed(seed: int) -> None:
    assert run_seed(seed) == run_seed(seed)
