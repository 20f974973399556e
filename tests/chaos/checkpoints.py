"""Processes that write and restore checkpoints, to be killed meanwhile. A module of their own: each imports it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dataplane as dp
from dataplane.client import checkpoint
from dataplane.client.checkpointfile import CheckpointWriter
from tests.processes import before_requests


def worker(pipe: Any, address: str, path: Path, what: str, step: Any, nth: int) -> None:
    """Writes or restores a checkpoint, in small pieces; stops before the nth request of a kind, to be killed there."""
    checkpoint.PIECE = 100 << 10
    plane = dp.connect(address)
    left = [nth]

    def stop() -> None:
        left[0] -= 1
        if not left[0]:
            pipe.send("there")
            pipe.recv()

    if step == "commit":
        commit = CheckpointWriter.commit

        def commits(self: CheckpointWriter) -> None:
            stop()
            commit(self)

        CheckpointWriter.commit = commits  # type: ignore[method-assign]
    else:
        before_requests(plane._inner.connection, lambda request: stop() if isinstance(request, step) else None)
    if what == "restore":
        plane.restore(path)
    else:
        plane.stream("s").checkpoint(path)
    pipe.send("done")


def rewritten(_: Any, address: str, path: Path) -> None:
    checkpoint.PIECE = 100 << 10
    with dp.connect(address) as plane:
        stream = plane.restore(path)
        stream.checkpoint(path)
        stream.drop()
