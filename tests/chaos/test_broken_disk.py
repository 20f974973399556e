"""A disk that turns read-only, files that are replaced by what never answers, and no thread to be had."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import dataplane as dp
from dataplane.errors import LimitExceeded
from dataplane.recording import Reader
from tests.mounts import mounted
from tests.processes import MIB, StandingNode, eventually, pattern


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 64 MiB, writable at the end."""
    with mounted(tmp_path / "mounted", "-o", "size=64m") as directory:
        yield directory
        remount(directory, "rw")


def remount(directory: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(directory)], check=True)


def files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.spill"))


def number(ref: dp.BatchRef) -> int:
    ((_, shard),) = ref.shards()
    return shard


def on_disk(directory: Path, refs: list[dp.BatchRef]) -> list[dp.BatchRef]:
    there = {int(path.stem, 16) for path in files(directory)}
    return [ref for ref in refs if number(ref) in there]


def test_a_put_on_a_disk_turned_read_only_is_backpressure_with_its_error(tmp_path: Path, disk: Path) -> None:
    """With read-back batches pinned and the quota full: their files are to make way for others, and can not."""
    with (
        StandingNode(tmp_path, memory="8MiB", spill="12MiB", spill_dir=disk) as node,
        dp.connect(node.address) as plane,
        dp.connect(node.address) as neighbour,
    ):
        refs: list[dp.BatchRef] = []
        with pytest.raises(dp.Backpressure):
            while True:
                refs.append(plane.put({"x": pattern(len(refs), MIB)}, timeout=0.3))
        spilled = on_disk(disk, refs)
        kept = [ref for ref in refs if ref not in spilled]
        for ref in kept[:3]:
            plane.free(ref)
        views = [plane.get(ref)["x"].numpy() for ref in spilled[:3]]
        remount(disk, "ro")
        for _ in range(3):
            with pytest.raises(dp.Backpressure) as caught:
                while True:  # some fit: they take the place of what was written ahead
                    refs.append(plane.put({"x": pattern(len(refs), MIB)}, timeout=0.3))
        assert "Read-only" in caught.value.spill_error
        assert np.array_equal(neighbour.get(kept[3])["x"].numpy(), pattern(refs.index(kept[3]), MIB))
        assert np.array_equal(views[1], pattern(refs.index(spilled[1]), MIB))
        remount(disk, "rw")
        again = plane.put({"x": pattern(99, MIB)}, timeout=60)
        assert np.array_equal(plane.get(again)["x"].numpy(), pattern(99, MIB))
        views.clear()
        assert node.kill(signal.SIGTERM) == 0
    assert list(disk.iterdir()) == []


# The spill disk full, and full no longer.


def test_a_full_disk_is_reported_in_backpressure_and_recovers(tmp_path: Path, small_disk: Path) -> None:
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(4 * MIB - 64 * 1024))
    with (
        StandingNode(tmp_path, memory="8MiB", spill="64MiB", spill_dir=small_disk) as node,
        dp.connect(node.address) as plane,
    ):
        refs = [plane.put({"x": pattern(seed, MIB)}) for seed in range(8)]
        with pytest.raises(dp.Backpressure) as caught:
            plane.put({"x": pattern(8, MIB)}, timeout=0.3)
        assert "No space left" in caught.value.spill_error
        assert caught.value.spill_error in str(caught.value)
        assert "No space left" in plane.stats().spill_error
        assert plane.stats().disk_used == 0
        assert not list(small_disk.rglob("*.spill"))
        for seed, ref in enumerate(refs):  # it stayed in memory
            assert np.array_equal(plane.get(ref)["x"].numpy(), pattern(seed, MIB))
        ballast.unlink()
        refs.append(plane.put({"x": pattern(8, MIB)}, timeout=60))
        assert plane.stats().spill_error == ""
        for seed, ref in enumerate(refs):
            assert np.array_equal(plane.get(ref)["x"].numpy(), pattern(seed, MIB))


# A recorder whose disk is full: the pipeline goes on, and it is told.

WAIT_S = 60.0
STEP = 1 << 20  # bytes


def rows(path: Path) -> list[int]:
    return [version for each in Reader(path).rows() for version in each.names.versions]


def test_rows_are_skipped_by_a_recorder_while_its_disk_is_full(tmp_path: Path, small_disk: Path) -> None:
    fence = small_disk / "fence"
    with StandingNode(tmp_path, memory="32MiB") as node, dp.connect(node.address) as plane:
        stream = plane.stream("rollouts", ["actor", "record"], max_bytes="8MiB")
        recording = stream.record(small_disk / "r", ["x"], compression="none", max_file_bytes=STEP)

        def step(version: int) -> None:
            stream.append({"x": [np.random.default_rng(version).bytes(STEP)]}, version=version)
            with stream.consume("actor", rows=1, columns=["x"], timeout=WAIT_S):
                pass
            eventually(lambda: stream.stats()["rows"] == 0, "the recorder is done with it")

        step(0)
        eventually(lambda: not [*(small_disk / "r" / "_open").glob("part-*")], "its part is a file")
        # A deleted file has no name before its blocks are free: those would be room for a row beside the fence.
        eventually(lambda: shutil.disk_usage(small_disk).used < 2 * STEP, "its part's room is free")
        with suppress(OSError), fence.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 14)):
                pass
        for version in range(1, 21):  # more than the stream holds
            step(version)
        assert isinstance(recording.error, LimitExceeded)
        eventually(lambda: recording.statistics().skipped == 20, "it has counted the last")
        fence.unlink()
        step(21)
        stream.close()
        with pytest.raises(LimitExceeded, match="does not fit"):
            recording.wait(WAIT_S)
    assert rows(small_disk / "r") == [0, 21]
    manifest = Reader(small_disk / "r").manifest
    assert (manifest.skipped, manifest.complete) == (20, False)
