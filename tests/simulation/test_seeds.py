"""Seeds of the protocol: every invariant holds in each; and single runs of all kinds."""

from __future__ import annotations

import msgspec
import pytest

from tests.cases import each_case
from tests.simulation.__main__ import PROTOCOL, STREAM, TABLE, Kind
from tests.simulation.faults import KINDS, Fault
from tests.simulation.injector import Injector
from tests.simulation.run import Outcome, run_seed
from tests.simulation.shrink import report

CHUNK = 100
FEW = 300
SEEDS = 1000
ALL = {"protocol": PROTOCOL, "stream": STREAM, "table": TABLE}


def outcomes(kind: Kind, first: int, seeds: int) -> list[Outcome]:
    """Those of so many seeds, in each of which every invariant holds."""
    found = [kind.run_seed(seed) for seed in range(first, first + seeds)]
    broken = [outcome for outcome in found if outcome.broken is not None]
    assert not broken, "\n".join(report(outcome, kind.run, kind.make) for outcome in broken[:3])
    return found


@pytest.mark.timeout(300)  # of a machine with much else to do; alone, a chunk takes 1.5 s
@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=[pytest.mark.long] * (first >= FEW)) for first in range(0, SEEDS, CHUNK)]
)
def test_every_invariant_holds(first: int) -> None:
    """And runs are dense: most change leaders and fill logs; few lose a partition in memory with all its replicas, and
    of those whose coordinator forgets everything, few are left without a node that may tell it."""
    found = outcomes(PROTOCOL, first, CHUNK)
    assert sum(outcome.epochs for outcome in found) > 4 * CHUNK
    assert sum(outcome.commands for outcome in found) > 50 * CHUNK
    wiped = [outcome for outcome in found if any(f.kind == "coordinator_wiped" for f in outcome.plan.faults)]
    others = [outcome for outcome in found if outcome not in wiped]
    assert sum(outcome.lost for outcome in others) < 0.05 * len(others)
    assert sum(outcome.lost for outcome in wiped) < 0.4 * len(wiped)
    assert {outcome.plan.durable for outcome in found} == {True, False}


@each_case("kind", ALL)
@each_case("seed", [3, 17, 2001])
def test_a_run_is_determined_by_its_seed(kind: str, seed: int) -> None:
    assert ALL[kind].run_seed(seed) == ALL[kind].run_seed(seed)


@each_case("fault", [kind[0] for kind in KINDS])
@each_case(("kind", "seeds"), [("protocol", (1, 2, 3, 4)), ("stream", (1, 2))])
def test_runs_recover_from_each_kind_of_fault(fault: str, kind: str, seeds: tuple[int, ...]) -> None:
    assert callable(getattr(Injector, fault))
    plans = [ALL[kind].plan(seed) for seed in seeds]
    assert {plan.durable for plan in plans} == {True, False}
    for plan in plans:
        alone = msgspec.structs.replace(plan, faults=(Fault(1.0, 0.4, fault, -1, -2, 0.5),))
        assert ALL[kind].run(alone).broken is None


@each_case("seed", [26875, 44814])
def test_a_restarted_follower_preserves_log_entries_after_a_snapshot(seed: int) -> None:
    """It was sent the leader's snapshot, dropped committed entries after it, and led without them."""
    assert run_seed(seed).broken is None


@each_case("seed", [26412, 26661])
def test_a_recruit_that_became_a_follower_unnoticed_may_lead(seed: int) -> None:
    """A leader whose recruit had followed and taken its place told a wiped coordinator that it led, alone."""
    assert run_seed(seed).broken is None


def test_a_late_message_does_not_prove_that_its_leader_is_alive() -> None:
    """A follower that was stopped heard what its leader had sent before, which had dropped it since."""
    assert run_seed(45316).broken is None


def test_a_dropped_row_is_removed_when_its_ack_fails_for_lost_rows() -> None:
    assert STREAM.run_seed(1375).broken is None
