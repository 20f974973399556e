"""What a look at a home sees, and what it takes from the look before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dataplane.node.observing import _look
from dataplane.stream.progress import ACKED, LEASED


def home(**changed: Any) -> Any:
    """A home of two tasks, as far as a look looks at it."""
    progress = SimpleNamespace(left=[{1: 3}, {1: 2, 2: 2}], counts=[[0] * 6, [0] * 6])
    facts = SimpleNamespace(oldest=lambda: 5.0)
    rows = SimpleNamespace(count=4)
    books = SimpleNamespace(progress=progress, rows=rows, appended=4, nbytes=40, facts=facts, unfinished=(), **changed)
    return SimpleNamespace(books=books, settings=SimpleNamespace(tasks=["reward", "actor"]))


def test_whatever_changes_is_seen() -> None:
    def lease(a: Any) -> None:
        a.books.progress.counts[1][LEASED] += 1

    def ack(a: Any) -> None:
        a.books.progress.counts[0][ACKED] += 1
        a.books.progress.left[0][1] -= 1

    def drop(a: Any) -> None:
        a.books.rows.count = 0
        a.books.progress.left = [{}, {}]

    def append(a: Any) -> None:
        a.books.appended += 1
        a.books.rows.count += 1

    def wait(a: Any) -> None:
        waiting.append((1, ("x",)))

    def stop_waiting(a: Any) -> None:
        waiting.clear()

    def admit(a: Any) -> None:
        waiting.append((None, ()))

    waiting: list[tuple[int | None, tuple[str, ...]]] = []
    a, seen = home(), None
    for change in (lease, ack, append, wait, stop_waiting, admit, drop):
        seen = _look(1, "rows", a, waiting, True, 7.0, seen)
        before = seen[0]
        change(a)
        seen = _look(1, "rows", a, waiting, True, 7.0, seen)
        assert seen[0] != before, change
        assert seen[0] == _look(1, "rows", a, waiting, True, 7.0, None)[0], change
