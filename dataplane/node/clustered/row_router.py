"""Requests about rows that are there: each finds the partitions that have them, by what a delivery said, or by key.

A key that a partition made names the partition; who has a key that a user gave is asked of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.errors import Misuse, ProtocolMismatch
from dataplane.node.clustered.asking import all_of
from dataplane.node.clustered.holders import Holders
from dataplane.node.clustered.session import Outcome, Session
from dataplane.node.clustered.streams import Partition, Stream, Streams
from dataplane.node.partitions.streams import partition_of_key
from dataplane.node.streams import packed
from dataplane.node.streams.packed import Index
from dataplane.stream import requests as r
from dataplane.wire import messages as m


@dataclass(frozen=True, slots=True)
class Found:
    """Rows of a partition: which of those in question they are, as positions, and their offsets in it."""

    partition: Partition
    positions: Index
    rows: Index


class RowRouter:
    """The requests of one client about rows that are there."""

    def __init__(self, session: Session, streams: Streams, holders: Holders) -> None:
        self._session = session
        self._streams = streams
        self._holders = holders

    # finding

    async def find(
        self, stream: Stream, rows: bytes, keys: list[str], origins: Sequence[tuple[bytes, bytes]]
    ) -> list[Found]:
        """The partitions of rows, by key or, where there are none, by offset and origin. Raises Misuse for what is in
        no partition of the stream, ProtocolMismatch."""
        if keys:
            return await self._keyed(stream, keys)
        offsets = packed.int64("rows", rows)
        found, named = [], np.zeros(len(offsets), np.int64)
        for token, positions_packed in origins:
            partition = await self._streams.partition(stream, token)
            positions = packed.int64("positions", positions_packed)
            ascend = (positions[1:] > positions[:-1]).all()
            if not ascend or (len(positions) and not 0 <= positions[0] <= positions[-1] < len(offsets)):
                raise ProtocolMismatch("positions that are not in order, or of rows that there are not")
            named[positions] += 1
            found.append(Found(partition, positions, offsets[positions]))
        if not (named == 1).all():
            raise ProtocolMismatch("rows of which it is not said once where they are from")
        return found

    async def _keyed(self, stream: Stream, keys: list[str]) -> list[Found]:
        found: dict[int, tuple[list[int], list[int]]] = {}
        others: list[int] = []  # of keys that users gave
        table = stream.table
        for at, key in enumerate(keys):
            number = partition_of_key(table, key) if key.startswith("~") else None
            offset = key.rpartition(".")[2]
            if number is None or not (offset.isascii() and offset.isdecimal() and len(offset) <= 18):
                others.append(at)
            else:
                positions, offsets = found.setdefault(number, ([], []))
                positions.append(at)
                offsets.append(int(offset))
        if others:
            await self._given(stream, keys, others, found)
        return [
            Found(stream.partition(number), np.array(positions, np.int64), np.array(offsets, np.int64))
            for number, (positions, offsets) in found.items()
        ]

    async def _given(
        self, stream: Stream, keys: list[str], others: list[int], found: dict[int, tuple[list[int], list[int]]]
    ) -> None:
        """Ask all partitions for the keys at these positions."""
        asked, left = r.Find(keys=[keys[at] for at in others]), dict.fromkeys(others)
        partitions = self._session.partitions(stream)
        replies = await all_of([self._session.ask(each, asked, r.Found) for each in partitions])
        for partition, reply in zip(partitions, replies, strict=True):
            for at, row in zip(others, reply.rows.tolist(), strict=True):
                if row >= 0 and at in left:
                    del left[at]
                    positions, offsets = found.setdefault(partition.number, ([], []))
                    positions.append(at)
                    offsets.append(row)
        if left:
            key = keys[next(iter(left))]
            raise Misuse(f"there is no row {key!r}: it was never appended here, or each task is done with it")

    # extending

    async def extend(self, request: m.Extend | m.ExtendInline, ref: BatchRef, stream: Stream) -> None:
        """More columns for rows, which `ref` means. Raises as `Home.extend`; OwnerDied, PeerUnavailable,
        OutcomeUnknown."""
        holds = packed.int64("holds", request.holds)
        lengths = packed.lengths(request.lengths, ref)
        count = len(request.keys) or len(request.rows) // 8
        if count != len(ref):
            raise Misuse(f"{len(ref)} rows of new columns for {count} rows")
        packed.one_a_row("holds", holds, 0 if request.keys else count)
        copies = request.spares if isinstance(request, m.Extend) else []
        found = await self.find(stream, request.rows, request.keys, request.origins)
        asked = []
        for each in found:
            at = each.positions
            every = len(at) == count and len(found) == 1 and bool((at[1:] > at[:-1]).all())
            extend = r.Extend(
                ref=ref if every else ref[at],
                rows=each.rows,
                lengths=lengths if every else {name: values[at] for name, values in lengths.items()},
                holds=holds[at] if len(holds) else holds,
                replace=request.replace,
                nodes=tuple(copies),
            )
            asked.append((each.partition, extend))
        await stream.fit(ref)
        await all_of([self._extend(partition, extend) for partition, extend in asked])

    async def _extend(self, partition: Partition, request: r.Extend) -> None:
        claim = await self._holders.claim(partition.key, [request.ref], request.nodes)

        def settled(outcome: Outcome) -> None:
            if isinstance(outcome, r.Result):
                claim.taken()
            else:
                claim.release()

        await self._session.ask(partition, request, r.Done, settled=settled)

    # dropping

    async def drop(self, request: m.DropRows, stream: Stream) -> None:
        """No task is to see these rows, and those of these groups, any more. Raises Misuse."""
        asked: dict[Partition, tuple[Index, list[str | int]]] = {}
        if request.rows or request.keys:
            for each in await self.find(stream, request.rows, request.keys, request.origins):
                asked[each.partition] = each.rows, []
        for partition, groups in (await self._grouped(stream, request.groups)).items():
            rows, _ = asked.get(partition, (packed.NOTHING, []))
            asked[partition] = rows, groups
        await all_of(
            [
                self._session.ask(partition, r.Drop(rows=rows, groups=groups), r.Done)
                for partition, (rows, groups) in asked.items()
            ]
        )

    async def _grouped(self, stream: Stream, groups: list[str | int]) -> dict[Partition, list[str | int]]:
        """The partitions that have rows of these groups, and of which. Raises Misuse for a group of no row."""
        if not groups:
            return {}
        partitions, left = self._session.partitions(stream), dict.fromkeys(groups)
        found: dict[Partition, list[str | int]] = {}
        asked = r.Find(groups=groups)
        replies = await all_of([self._session.ask(each, asked, r.Found) for each in partitions])
        for partition, reply in zip(partitions, replies, strict=True):
            here = [group for group, there in zip(groups, reply.groups, strict=True) if there]
            if here:
                found[partition] = here
            for group in here:
                left.pop(group, None)
        if left:
            group = next(iter(left))
            raise Misuse(f"there is no row of the group {group!r}: each task is done with it, or it never was")
        return found
