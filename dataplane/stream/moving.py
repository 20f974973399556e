"""Rows that come to a home from elsewhere, with all that is known of them: their own home has died, or is this one now.

What always holds: a row that comes is pending for each task that is not known to have done it, and has a new number
here; one whose key is here already does not come again, but what tasks have done of it elsewhere is done here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from dataplane.batch.ref import BatchRef
from dataplane.errors import Corrupt
from dataplane.stream.block import Block
from dataplane.stream.home import Home
from dataplane.stream.page import Index
from dataplane.stream.progress import ACKED, EXPIRED, PENDING
from dataplane.stream.snapshot import block_rows, put_back

T = TypeVar("T")

Columns = list[tuple[Index, int, BatchRef, dict[str, Index]]]
"""Rows, for which task they were held by who brought these columns (-1: none), a reference, and lengths by column."""

_NONE: Index = np.empty(0, np.int64)


def adopt(home: Home, block: Block, now: float) -> tuple[Index, Index]:
    """The rows of the block come, without their columns. Which of them have come, by their numbers elsewhere, and by
    their numbers here. Raises Corrupt for a block that is none, LimitExceeded."""
    were = block_rows(block)
    if len(were) and not ((were[1:] > were[:-1]).all() and were[0] >= 0):
        raise Corrupt("a block of rows that are not in order")
    known = np.array([bool(key) and home.books.keys.has(key) for key in block.keys], np.bool_)
    _settle(home, block, known)
    were = were[~known]
    came = np.arange(home.books.rows.next, home.books.rows.next + len(were))
    put_back(home, renumbered(block, were, came), now, anew=True)
    home.books.appended += len(came)
    return were, came


def _settle(home: Home, block: Block, known: npt.NDArray[np.bool_]) -> None:
    """These rows of the block are here already: what tasks have done of them where they were meanwhile is done. Who
    holds such a row holds it still."""
    if not known.any():
        return
    books, tasks = home.books, len(home.settings.tasks)
    states = np.frombuffer(block.states, np.uint8)
    if len(states) != tasks * len(known):
        raise Corrupt(f"a block of {len(known)} rows and {len(states)} bytes of what is known of them")
    rows = books.keys.known_rows([key for key, there in zip(block.keys, known, strict=True) if there])
    for task, of in enumerate(states.reshape(tasks, -1)[:, known]):
        for state in (ACKED, EXPIRED):
            done(home, task, rows[of == state], state)


def done(home: Home, task: int, rows: Index, state: int) -> None:
    """The task is done with those of these rows that are here, wherever it has said so; who holds one holds it."""
    books = home.books
    rows = np.unique(rows[books.rows.there(rows)])
    places = books.rows.places(rows)
    pending = books.progress.states(places, len(rows))[task] == PENDING
    books.settle(task, rows[pending & ~books.progress.dropped(places, len(rows))], state)


def renumbered(block: Block, were: Index, came: Index) -> Block:
    """Those rows of the block that had the numbers `were`, which ascend, with the numbers `came`, which may not: in the
    order of those. An append that is not there as a whole is none that could be made again."""
    numbers = dict(zip(were.tolist(), came.tolist(), strict=True))
    calls = [
        (key, numbers[first], count, digest)
        for key, first, count, digest in block.calls
        if first in numbers and all(numbers.get(first + i) == numbers[first] + i for i in range(count))
    ]
    order, count = np.argsort(came), len(block.keys)
    at = np.flatnonzero(np.isin(block_rows(block), were))[order]

    def of(packed: bytes, kind: str) -> bytes:
        if count and len(packed) % (count * np.dtype(kind).itemsize):
            raise Corrupt(f"a block of {count} rows and {len(packed)} bytes of what is known of them")
        return np.frombuffer(packed, kind).reshape(-1, count)[:, at].tobytes() if count else b""

    def picked(values: Sequence[T]) -> list[T]:
        if len(values) != count:
            raise Corrupt(f"a block of {count} rows and {len(values)} values")
        return [values[i] for i in at.tolist()]

    return Block(
        rows=came[order].tobytes(),
        groups=picked(block.groups),
        versions=of(block.versions, "<i8"),
        ages_s=of(block.ages_s, "<f8"),
        tags={name: picked(values) for name, values in block.tags.items()},
        keys=picked(block.keys),
        calls=calls,
        states=of(block.states, "u1"),
        tries=of(block.tries, "u1"),
        dropped=block.dropped,
    )


def some_columns(columns: Columns, were: Index, came: Index) -> Columns:
    """The columns of those rows that had the numbers `were`, for these rows, with the numbers `came`."""
    order = np.argsort(were)
    sorted_were, sorted_came = were[order], came[order]
    found: Columns = []
    for rows, task, ref, lengths in columns:
        at = np.flatnonzero(np.isin(rows, were))
        if len(at):
            now = sorted_came[np.searchsorted(sorted_were, rows[at])]
            part = ref if len(at) == len(rows) else ref[at]
            found.append((now, task, part, {name: values[at] for name, values in lengths.items()}))
    return found
