"""A recorder whose disk is full: the pipeline goes on, and it is told."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import dataplane as dp
from dataplane.errors import LimitExceeded
from dataplane.recording import Reader
from tests.processes import StandingNode, eventually

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


@pytest.mark.long
def test_rows_wait_for_a_recorder_that_is_to_wait_for_disk_space(tmp_path: Path, small_disk: Path) -> None:
    fence = small_disk / "fence"
    fence.write_bytes(bytes(3 << 20))
    with StandingNode(tmp_path, memory="32MiB") as node, dp.connect(node.address) as plane:
        stream = plane.stream("rollouts", ["record"])
        recording = stream.record(small_disk / "r", ["x"], compression="none", on_full="wait")
        stream.append({"x": [np.random.default_rng(0).bytes(STEP)]}, version=7)
        stream.close()
        eventually(lambda: isinstance(recording.error, LimitExceeded), "it waits for room, and says so")
        assert recording.statistics().skipped == 0
        fence.unlink()
        recording.wait(WAIT_S)
    assert rows(small_disk / "r") == [7]
    assert Reader(small_disk / "r").manifest.complete
