"""Seeds of the protocol: every invariant holds in each; and single runs of all kinds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from tests.cases import each_case
from tests.simulation.__main__ import PROTOCOL, STREAM, TABLE, Kind
from tests.simulation.faults import KINDS, Fault, plan
from tests.simulation.injector import Injector
from tests.simulation.planted import FAULTS
from tests.simulation.run import Outcome, run, run_seed
from tests.simulation.shrink import kept, only, report, shrink

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
    for each in plans:
        alone = msgspec.structs.replace(each, faults=(Fault(1.0, 0.4, fault, -1, -2, 0.5),))
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


# The simulator itself: a run is its seed, a broken one can be had again, and with fewer faults.

ROOT = Path(__file__).parents[2]


def test_runs_without_faults_change_configurations_by_recruiting_only() -> None:
    outcome = run(msgspec.structs.replace(plan(8), faults=()))
    assert outcome.broken is None
    assert outcome.epochs == 1 + min(outcome.plan.followers, outcome.plan.nodes - 1)  # restarted, and recruited


def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Seeds that find a fault, which is planted."""
    FAULTS["a_sync_is_skipped"](monkeypatch.setattr)
    return (seed for seed in range(1000) if run_seed(seed).broken is not None)


def test_broken_runs_are_shrunk_and_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in islice(broken(monkeypatch), 2):
        outcome = run_seed(seed)
        smallest = shrink(outcome)
        faults = kept(outcome.plan, smallest.plan)
        assert 0 < len(faults) < len(outcome.plan.faults)
        assert run(only(outcome.plan, faults)) == smallest
        fewer = [run(only(outcome.plan, [fault for fault in faults if fault != one])) for one in faults]
        left = [each.broken for each in fewer if each.broken is not None]
        assert not [broken for broken in left if broken.split(":")[0] == str(outcome.broken).split(":")[0]]
        assert len(left) < len(fewer) / 2  # what may break is another invariant, seldom


def test_the_command_runs_in_two_processes() -> None:
    asked = [sys.executable, "-m", "tests.simulation", "--seeds", "12", "--first", "7000", "--jobs", "2"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "seeds 7000 to 7011: 0 break an invariant" in done.stdout
