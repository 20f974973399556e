"""Seeds of the protocol: every invariant holds in each."""

from __future__ import annotations

import pytest

from tests.cases import each_case
from tests.simulation.run import run_seed
from tests.simulation.shrink import report

CHUNK = 100
FEW = 300
SEEDS = 1000


@pytest.mark.timeout(300)  # of a machine with much else to do; alone, a chunk takes 1.5 s
@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.long] * (first >= FEW)) for first in range(0, SEEDS, CHUNK)]
)
def test_every_invariant_holds(first: int) -> None:
    outcomes = [run_seed(seed) for seed in range(first, first + CHUNK)]
    broken = [outcome for outcome in outcomes if outcome.broken is not None]
    assert not broken, "\n".join(report(outcome) for outcome in broken[:3])


@each_case("seed", [26875, 44814])
def test_a_follower_that_restarts_keeps_what_it_has_beyond_a_snapshot(seed: int) -> None:
    """It was sent the leader's snapshot, dropped committed entries after it, and led without them."""
    assert run_seed(seed).broken is None


@each_case("seed", [26412, 26661])
def test_who_may_have_become_a_follower_unheard_may_lead(seed: int) -> None:
    """A leader whose recruit had followed and taken its place told a wiped coordinator that it led, alone."""
    assert run_seed(seed).broken is None


def test_a_message_that_was_heard_late_says_little_of_when_its_leader_lived() -> None:
    """A follower that was stopped heard what its leader had sent before, which had dropped it since."""
    assert run_seed(45316).broken is None


def test_runs_are_dense() -> None:
    """Most seeds change leaders and fill logs; few lose a partition in memory with all its replicas, and of those whose
    coordinator forgets everything, few are left with nobody who may tell it."""
    outcomes = [run_seed(seed) for seed in range(CHUNK)]
    assert sum(outcome.epochs for outcome in outcomes) > 4 * CHUNK
    assert sum(outcome.commands for outcome in outcomes) > 50 * CHUNK
    wiped = [outcome for outcome in outcomes if any(f.kind == "coordinator_wiped" for f in outcome.plan.faults)]
    others = [outcome for outcome in outcomes if outcome not in wiped]
    assert sum(outcome.lost for outcome in others) < 0.05 * len(others)
    assert sum(outcome.lost for outcome in wiped) < 0.4 * len(wiped)
    assert {outcome.plan.durable for outcome in outcomes} == {True, False}
