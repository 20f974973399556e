"""Which partitions new rows go to."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataplane.errors import Closed
from dataplane.node.clustered.asking import patiently
from dataplane.node.clustered.streams import Partition, Stream
from dataplane.node.partitions.directory import Directory
from dataplane.node.streams.packed import Index

_TEND_S = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """Rows, as positions, that go to a partition, by this version of the placement table; 0 where they do not go by
    it."""

    partition: Partition
    rows: Index
    table: int

    def among(self, other: Share) -> Share:
        """The same, where the rows are positions among those of another share."""
        return Share(self.partition, other.rows[self.rows], self.table)


class Placing:
    """The placement of new rows, for the producers of one node."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    async def place(
        self, stream: Stream, count: int, groups: Sequence[str | int], keys: Sequence[str], *, whole: bool
    ) -> list[Share]:
        """The shares of `count` rows of these groups or, where they have none, of these keys, if they have some.
        `whole`: all rows of these groups come now. Raises Closed, PeerUnavailable, OutcomeUnknown."""
        if groups and not whole:
            size = stream.settings.group_size
            return await (self._by_size(stream, groups, size) if size else self._by_table(stream, groups))
        if keys and not groups:
            return await self._by_table(stream, keys)
        return [Share(await self._own(stream), np.arange(count), 0)]

    async def _by_size(self, stream: Stream, places: Sequence[str | int], size: int) -> list[Share]:
        """Groups of so many rows stay here, others go where the table has them."""
        counts = Counter(places)
        here = np.fromiter((counts[place] == size for place in places), np.bool_, len(places))
        own = [Share(await self._own(stream), np.flatnonzero(here), 0)] if here.any() else []
        if here.all():
            return own
        others = np.flatnonzero(~here)
        shares = await self._by_table(stream, [places[at] for at in others.tolist()])
        return [*own, *(Share(each.partition, others[each.rows], each.table) for each in shares)]

    async def _by_table(self, stream: Stream, places: Sequence[str | int]) -> list[Share]:
        table, names = stream.table, list(dict.fromkeys(places))
        placed = await self._directory.place(table, names)
        if len(placed) == 1:
            return [Share(stream.partition(placed[0].number), np.arange(len(places)), placed[0].version)]
        of = np.empty(len(names), np.int64)
        for at, each in enumerate(placed):
            of[each.positions] = at
        if len(names) < len(places):
            by_name = dict(zip(names, of.tolist(), strict=True))
            of = np.fromiter(map(by_name.__getitem__, places), np.int64, len(places))
        return [
            Share(stream.partition(each.number), np.flatnonzero(of == at), each.version)
            for at, each in enumerate(placed)
        ]

    async def again(
        self, stream: Stream, count: int, groups: Sequence[str | int], keys: Sequence[str], *, whole: bool
    ) -> list[Share]:
        """As `place`, by the table as it is at the coordinator now."""
        await patiently(lambda: self._directory.read(stream.name))
        return await self.place(stream, count, groups, keys, whole=whole)

    async def tend(self, stream: Stream) -> None:
        """Have a partition that is lost taken out of the placement. Raises Closed, PeerUnavailable."""
        await asyncio.sleep(_TEND_S)  # this node may be the last to know
        await patiently(lambda: self._directory.take_care(stream.table))

    async def _own(self, stream: Stream) -> Partition:
        """The partition of this node's producers."""
        if stream.own is not None:
            return stream.own
        _, number = await patiently(lambda: self._directory.own(stream.name))
        if stream.dropped:
            raise Closed("the stream was dropped")
        return stream.partition(number)
