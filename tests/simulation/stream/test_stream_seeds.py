"""The stream's own partitions, simulated: every invariant holds in the first seeds."""

from __future__ import annotations

import msgspec
import pytest

from tests.cases import each_case
from tests.simulation.faults import KINDS, Fault
from tests.simulation.shrink import report
from tests.simulation.stream.run import plan, run, run_seed, streams

SEEDS = 300


@pytest.mark.timeout(300)  # of a machine with much else to do; alone, it takes 20 s
def test_every_invariant_holds() -> None:
    """And runs are dense: most change leaders and fill logs, few lose a partition in memory with all its replicas."""
    outcomes = [run_seed(seed) for seed in range(SEEDS)]
    broken = [outcome for outcome in outcomes if outcome.broken is not None]
    assert not broken, "\n".join(report(outcome, run, "make simulate STREAM=1") for outcome in broken[:3])
    assert sum(outcome.epochs for outcome in outcomes) > 4 * SEEDS
    assert sum(outcome.commands for outcome in outcomes) > 50 * SEEDS
    assert sum(outcome.lost for outcome in outcomes) < 0.05 * SEEDS
    assert {outcome.plan.durable for outcome in outcomes} == {True, False}
    assert {streams(outcome.plan.seed) for outcome in outcomes} == {1, 2, 3}


@each_case("seed", [3, 17])
def test_a_run_is_its_seed(seed: int) -> None:
    assert run_seed(seed) == run_seed(seed)


@each_case("kind", [kind[0] for kind in KINDS])
def test_each_kind_of_fault_ends(kind: str) -> None:
    """One of it alone, in a run on disk and in one in memory; all goes on after it."""
    plans = [next(plan(seed) for seed in range(1, 40) if plan(seed).durable is durable) for durable in (True, False)]
    for whole in plans:
        fault = Fault(1.0, 0.4, kind, -1, -2, 0.5)
        assert run(msgspec.structs.replace(whole, faults=(fault,))).broken is None


def test_a_dropped_row_goes_when_its_ack_is_refused_since_others_of_the_delivery_are_lost() -> None:
    assert run_seed(1375).broken is None
