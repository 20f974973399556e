"""The stream's own partitions, simulated: every invariant holds in the first seeds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.cases import each_case
from tests.simulation.faults import KINDS, Fault
from tests.simulation.shrink import only, report
from tests.simulation.stream.planted import FAULTS
from tests.simulation.stream.run import plan, run, run_seed, streams

ROOT = Path(__file__).parents[3]
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


def test_a_broken_run_is_said_and_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS["rows_on_their_way_are_given_again"](monkeypatch.setattr)
    outcome = next(outcome for outcome in map(run_seed, range(SEEDS)) if outcome.broken is not None)
    text = report(outcome, run, "make simulate STREAM=1")
    assert f"make simulate STREAM=1 SEED={outcome.plan.seed} KEEP=" in text
    keep = text.rpartition("KEEP=")[2]
    assert run(only(outcome.plan, [] if keep == "none" else [int(i) for i in keep.split(",")])).broken is not None


def test_the_command_runs_it() -> None:
    asked = [sys.executable, "-m", "tests.simulation", "--stream", "--seeds", "3", "--first", "9", "--jobs", "1"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "seeds 9 to 11: 0 break an invariant" in done.stdout
