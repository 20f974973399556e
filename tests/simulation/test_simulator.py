"""The simulator itself: a run is its seed, a broken one can be had again, and with fewer faults."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import msgspec
import pytest

from dataplane.replication.log import ExtendLog, TruncateLog
from dataplane.replication.messages import LogEntry
from tests.simulation.disk import Disk
from tests.simulation.faults import plan
from tests.simulation.planted import FAULTS
from tests.simulation.run import run, run_seed
from tests.simulation.shrink import kept, only, shrink

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


def test_a_simulated_disk_retains_synced_writes_and_a_prefix_of_the_rest() -> None:
    lengths = set()
    for seed in range(60):
        disk = Disk()
        disk.write(1, ExtendLog(1, (LogEntry(1, b"a"), LogEntry(1, b"b"))))
        assert disk.sync(1) == 1
        disk.write(2, ExtendLog(3, (LogEntry(1, b"c"), LogEntry(1, b"d"), LogEntry(1, b"e"))))
        disk.write(3, TruncateLog(1))
        disk.crash(Random(seed))
        commands = [entry.command for entry in disk.load().entries]
        assert commands == [b"a", b"b", b"c", b"d", b"e"][: len(commands)]
        lengths.add(len(commands))
    assert lengths == {1, 2, 3, 4, 5}  # truncated, nothing more, torn after one and two, and whole
