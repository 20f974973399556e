"""Snapshots of a stream over several hosts, and streams that are restored on one of them.

A snapshot is one of each part, told as one: the rows of each part follow those of the parts before, on pages of their
own. It is no single moment: what happens while the parts are asked may be in it or not; each row is in it once, with
its columns at one moment. A stream is restored to the part here, and its rows then move to their homes
(`node.spread.rehoming`).

What always holds: what a snapshot's columns need stays, wherever it is stored, until it is released or its client goes.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import msgspec

from dataplane.errors import Misuse
from dataplane.node.spread.reach import Reach
from dataplane.node.spread.wholes import Part, Whole
from dataplane.node.streams import packed
from dataplane.node.streams.snapshots import MAX_SNAPSHOTS
from dataplane.stream.block import Block, Head
from dataplane.stream.page import PAGE
from dataplane.wire import messages as m


@dataclass(frozen=True, slots=True)
class _Of:
    """A part's snapshot: its number there, and the numbers that its rows have in the whole: from `first` on."""

    part: Part
    number: int
    first: int
    count: int


class Snapshotting:
    """The snapshots that one client reads."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._taken: dict[int, list[_Of]] = {}
        self._numbers = itertools.count(1)

    async def take(self, request: m.TakeSnapshot, whole: Whole) -> m.SnapshotTaken:
        """All parts as they are now. Raises LimitExceeded, PeerUnavailable."""
        packed.bound("snapshots of a client at a time", MAX_SNAPSHOTS, len(self._taken) + 1)
        taken = await self._reach.of_all(whole, lambda part: m.TakeSnapshot(0, part.token), m.SnapshotTaken)
        several: list[_Of] = []
        first = 0
        for part, reply in taken:
            count = -(-reply.head.following // PAGE) * PAGE
            several.append(_Of(part, reply.snapshot, first, count))
            first += count
        number = -next(self._numbers)  # those of the parts here are positive
        self._taken[number] = several
        heads = [reply.head for _, reply in taken]
        pages = [page + of.first // PAGE for of, head in zip(several, heads, strict=True) for page in head.pages]
        return m.SnapshotTaken(request.id, number, _together(whole, heads, pages, first))

    async def read(self, request: m.ReadSnapshot) -> m.SnapshotRows:
        """Some of its rows. Raises Misuse, PeerUnavailable."""
        for of in self._taken.get(request.snapshot, ()):
            if of.first <= request.first < of.first + of.count:
                asked = m.ReadSnapshot(0, of.number, request.first - of.first, request.count)
                found = await self._reach.ask(of.part, asked, m.SnapshotRows)
                columns = [(_later(rows, of.first), task, ref) for rows, task, ref in found.columns]
                return m.SnapshotRows(request.id, _moved(found.block, of.first), columns)
        raise Misuse(f"no rows {request.first} and {request.count} more of a snapshot {request.snapshot}")

    def release(self, number: int) -> None:
        """Nobody reads the snapshot any more."""
        for of in self._taken.pop(number, ()):
            self._reach.soon(of.part, m.ReleaseSnapshot(of.number))


def _together(whole: Whole, heads: list[Head], pages: list[int], following: int) -> Head:
    return Head(
        settings=whole.settings,
        mark=whole.here.mark,
        following=following,
        appended=sum(head.appended for head in heads),
        latest=max(head.latest for head in heads),
        closed=all(head.closed for head in heads),
        counts=[
            [sum(of) for of in zip(*by_part, strict=True)] for by_part in zip(*(h.counts for h in heads), strict=True)
        ],
        pages=pages,
    )


def _later(rows: bytes, first: int) -> bytes:
    return (packed.int64("rows", rows) + first).tobytes()


def _moved(block: Block, first: int) -> Block:
    calls = [(key, number + first, count, digest) for key, number, count, digest in block.calls]
    return msgspec.structs.replace(block, rows=_later(block.rows, first), calls=calls)
