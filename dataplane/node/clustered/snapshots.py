"""Snapshots of a clustered stream that one client reads.

A snapshot is one of each partition, told as one: the rows of each partition follow those of the partitions before, on
pages of their own. It is no single moment: what happens while the partitions are asked may be in it or not; each row is
in it once, with its columns at one moment.

What always holds: what a snapshot's columns need stays, wherever it is stored, until it is released or its client goes;
a partition's leader sees to that, and who reads from another leader is refused.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

import msgspec

from dataplane.errors import Closed, Lost, Misuse
from dataplane.node.clustered.asking import all_of
from dataplane.node.clustered.session import Session
from dataplane.node.clustered.streams import Partition, Stream
from dataplane.node.streams import packed
from dataplane.node.streams.snapshots import MAX_SNAPSHOTS
from dataplane.stream import requests as r
from dataplane.stream.block import Block, Head
from dataplane.stream.page import PAGE
from dataplane.wire import messages as m

FIRST = 1 << 32
"""The number of the first: a client may have snapshots of streams of one node, too."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A partition's snapshot: its number there, and the numbers of its rows in the whole: from `first` on."""

    stream: Stream
    partition: Partition
    number: int
    head: Head
    first: int
    count: int


class ClusteredSnapshots:
    """The snapshots of one client."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._taken: dict[int, list[_Part]] = {}
        self._numbers = itertools.count(FIRST)
        self._releasing = 0
        self._released = asyncio.Event()
        self._released.set()

    async def take(self, request: m.TakeSnapshot, stream: Stream) -> m.SnapshotTaken:
        """All partitions as they are now. Raises LimitExceeded, PeerUnavailable, Lost."""
        packed.bound("snapshots of a client at a time", MAX_SNAPSHOTS, len(self._taken) + 1)
        await self._released.wait()  # or partitions would count those too
        parts: list[_Part] = []
        first = 0
        for partition, reply in await self._take_all(self._session.partitions(stream)):
            count = -(-reply.head.following // PAGE) * PAGE
            parts.append(_Part(stream, partition, reply.snapshot, reply.head, first, count))
            first += count
        number = next(self._numbers)
        self._taken[number] = parts
        return m.SnapshotTaken(request.id, number, _together(stream, parts, first))

    async def _take_all(self, partitions: list[Partition]) -> list[tuple[Partition, r.SnapshotTaken]]:
        """A snapshot of each, or of none."""
        taken: list[tuple[Partition, r.SnapshotTaken]] = []

        async def one(partition: Partition) -> None:
            taken.append((partition, await self._session.ask(partition, r.TakeSnapshot(), r.SnapshotTaken)))

        try:
            await all_of([one(partition) for partition in partitions])
        except BaseException:
            for partition, reply in taken:
                self._session.soon(partition, r.ReleaseSnapshot(snapshot=reply.snapshot))
            raise
        return sorted(taken, key=lambda each: each[0].number)

    async def read(self, request: m.ReadSnapshot) -> m.SnapshotRows:
        """Some of its rows. Raises LeaseExpired where a partition has another leader since, Closed, Lost, Misuse."""
        for part in self._taken.get(request.snapshot, ()):
            if part.first <= request.first < part.first + part.count:
                first = request.first - part.first
                asked = r.ReadSnapshot(snapshot=part.number, first=first, count=request.count)
                try:
                    found = await self._session.ask(part.partition, asked, r.SnapshotRows)
                except Lost as error:
                    if part.stream.dropped:
                        raise Closed("the stream was dropped while it was written") from error
                    raise
                columns = [((rows + part.first).tobytes(), task, ref.encode()) for rows, task, ref in found.columns]
                return m.SnapshotRows(request.id, _moved(found.block, part.first), columns)
        raise Misuse(f"no rows {request.first} and {request.count} more of a snapshot {request.snapshot}")

    def release(self, number: int) -> None:
        """Nobody reads the snapshot any more."""
        parts = self._taken.pop(number, None)
        if parts is not None:
            self._releasing += 1
            self._released.clear()
            self._session.run_soon(self._release(parts))

    async def _release(self, parts: list[_Part]) -> None:
        try:
            await all_of([self._session.ask(p.partition, r.ReleaseSnapshot(snapshot=p.number), r.Done) for p in parts])
        finally:
            self._releasing -= 1
            if not self._releasing:
                self._released.set()

    def leave(self) -> None:
        """The client has gone; partitions hear it from its session."""
        self._taken.clear()


def _together(stream: Stream, parts: list[_Part], following: int) -> Head:
    heads = [part.head for part in parts]
    return Head(
        settings=stream.settings,
        mark=heads[0].mark,
        following=following,
        appended=sum(head.appended for head in heads),
        latest=max(head.latest for head in heads),
        closed=all(head.closed for head in heads),
        counts=[
            [sum(of) for of in zip(*by_part, strict=True)]
            for by_part in zip(*(head.counts for head in heads), strict=True)
        ],
        pages=[page + part.first // PAGE for part in parts for page in part.head.pages],
    )


def _moved(block: Block, first: int) -> Block:
    calls = [(key, number + first, count, digest) for key, number, count, digest in block.calls]
    return msgspec.structs.replace(block, rows=(packed.int64("rows", block.rows) + first).tobytes(), calls=calls)
