"""What a look at a home sees, and what it takes from the look before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dataplane.node.telemetry import _look
from dataplane.stream.progress import ACKED, LEASED


def leased(**changed: Any) -> Any:
    """A home of two tasks, as far as a look looks at it."""
    progress = SimpleNamespace(left=[{1: 3}, {1: 2, 2: 2}], counts=[[0] * 6, [0] * 6])
    metadata = SimpleNamespace(oldest=lambda: 5.0)
    rows = SimpleNamespace(count=4)
    partition = SimpleNamespace(
        progress=progress, rows=rows, appended=4, nbytes=40, metadata=metadata, unfinished=(), **changed
    )
    return SimpleNamespace(partition=partition, settings=SimpleNamespace(tasks=["reward", "actor"]))


def test_whatever_changes_is_seen() -> None:
    def lease(a: Any) -> None:
        a.partition.progress.counts[1][LEASED] += 1

    def ack(a: Any) -> None:
        a.partition.progress.counts[0][ACKED] += 1
        a.partition.progress.left[0][1] -= 1

    def drop(a: Any) -> None:
        a.partition.rows.count = 0
        a.partition.progress.left = [{}, {}]

    def append(a: Any) -> None:
        a.partition.appended += 1
        a.partition.rows.count += 1

    def wait(a: Any) -> None:
        waiting.append((1, ("x",)))

    def stop_waiting(a: Any) -> None:
        waiting.clear()

    def admit(a: Any) -> None:
        waiting.append((None, ()))

    waiting: list[tuple[int | None, tuple[str, ...]]] = []
    a, seen = leased(), None
    for change in (lease, ack, append, wait, stop_waiting, admit, drop):
        seen = _look(1, "rows", a, waiting, True, 7.0, seen)
        before = seen[0]
        change(a)
        seen = _look(1, "rows", a, waiting, True, 7.0, seen)
        assert seen[0] != before, change
        assert seen[0] == _look(1, "rows", a, waiting, True, 7.0, None)[0], change
