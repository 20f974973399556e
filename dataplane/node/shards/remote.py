"""A shard of another host, which takes the place of the file of a local shard.

A small shard is read as a whole. Of a larger one the tables of its columns are read and validated, and the values of
the rows that any reader has asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np

from dataplane.batch import cuts
from dataplane.batch.byte_ranges import ByteRanges, is_sliceable, merged, tables, total, values, without
from dataplane.batch.layout import Bytes, check_contents
from dataplane.batch.layout_check import check_layout
from dataplane.batch.rows import RowIndices
from dataplane.errors import Misuse
from dataplane.node.shards.reading import ShardReads, WantedRanges
from dataplane.wire import shard_messages as sm

Want: TypeAlias = tuple[Sequence[int], RowIndices, sm.EncodedCut] | bytes
"""A part of a shard: columns by ordinal, ascending rows, and the part of each row; or byte ranges of the values of the
only column, as in `PinShards.chunks`."""

Patch: TypeAlias = Callable[[bytes, memoryview], Awaitable[bool]]
"""Makes a shard with this encoded layout in memory. Returns whether the shard was made."""

_WORTH = 256 << 10  # bytes: a smaller shard is fetched as a whole
_NAMING = 1 << 10  # bytes that arrive in the time that it takes to plan, name and gather one range
_MOST_WANTS, _MOST_RANGES = 64, 1 << 16


def wanted_of(
    shards: Sequence[sm.Wanted], parts: Sequence[sm.RowParts], chunks: Sequence[sm.ChunkPart] = ()
) -> list[tuple[bytes, int, list[Want]]]:
    """For each shard its node, its number, and the wanted rows: those of `shards`, `parts` of rows, or byte ranges of
    `chunks`. Raises ValueError if the message is invalid."""
    for told in (parts, chunks):
        if told and len(told) != len(shards):
            raise ValueError(f"parts of {len(told)} shards where {len(shards)} are wanted")
    found: list[tuple[bytes, int, list[Want]]] = []
    for number, (node, shard, wants) in enumerate(shards):
        several: list[Want] = []
        if chunks and chunks[number][0]:
            found.append((node, shard, [chunks[number][0]]))
            continue
        for ordinals, encoded, *cut in parts[number] if parts else wants:
            rows = RowIndices.decode(encoded)
            encoded_cut: sm.EncodedCut = cut[0] if cut else []
            cuts.decode(encoded_cut, len(rows))
            several.append((tuple(ordinals), rows, encoded_cut))
        found.append((node, shard, several))
    return found


class Remote:
    """A shard of another host. All parts wanted so far are read again whenever its local memory was reclaimed.

    Invariants: the byte ranges `_there` are in the shard's present memory. The wanted parts only grow. `_behind` is set
    from the time that a part is wanted until a fetch of all wanted parts has succeeded.
    """

    def __init__(
        self, reading: ShardReads, owner: bytes, shard: int, encoded: bytes, size: int, *, whole: bool
    ) -> None:
        self._reading = reading
        self._owner = owner
        self._shard = shard
        self._encoded = encoded
        self._layout = check_layout(encoded, size).layout
        self._size = size
        self._whole = size < _WORTH
        self._wants: list[Want] = []
        self._behind = False
        self._there: ByteRanges = [(0, size)] if whole else []
        self._turn = asyncio.Lock()
        self.patch: Patch | None = None
        """Makes the shard from its deltas, in place of a fetch."""

    def want(self, wants: Iterable[Want]) -> bool:
        """Add wanted parts. Returns whether some wanted part must still be fetched, even if another reader is fetching
        it. Raises Misuse for a part that the shard does not have."""
        new = [want for want in wants if want not in self._wants]
        columns = self._layout.columns
        for want in new:
            if isinstance(want, bytes):
                self._ranges(want)
                continue
            ordinals, rows, cut = want
            there = all(0 <= o < len(columns) for o in ordinals) and rows.stop <= columns[0][1].rows
            if not there or not all(is_sliceable(columns[o][1].field, cut) for o in ordinals):
                raise Misuse(f"shard {self._shard} of node {self._owner.hex()} has not these columns or rows")
        if new and not self._whole:
            self._behind = True
            self._wants += new
            self._whole = len(self._wants) > _MOST_WANTS or any(self._everything(want) for want in new)
        return self._behind

    def want_whole(self) -> None:
        """Let the next read fetch the whole shard."""
        self._whole = True

    def covers(self, wants: Iterable[Want]) -> bool:
        """Whether these parts are in memory, provided that the shard has memory."""
        return self.complete or (not self._behind and all(want in self._wants for want in wants))

    def _ranges(self, want: bytes) -> ByteRanges:
        """The places of these bytes of the only column. Raises Misuse."""
        columns = self._layout.columns
        found = np.frombuffer(want[: len(want) // 16 * 16], "<i8").reshape(-1, 2)
        if len(columns) != 1 or columns[0][1].field.kind != "ragged" or 16 * len(found) != len(want):
            raise Misuse(f"shard {self._shard} of node {self._owner.hex()} is no row of bytes")
        offset, size = columns[0][1].buffers[1]
        flat = np.concatenate([[0], found.reshape(-1), [size]])
        if (np.diff(flat) < 0).any():
            raise Misuse(f"shard {self._shard} of node {self._owner.hex()} has not these bytes")
        return [(start, stop) for start, stop in (found + offset).tolist()]

    def _everything(self, want: Want) -> bool:
        if isinstance(want, bytes):
            return False
        ordinals, rows, cut = want
        columns = self._layout.columns
        return not cut and len(set(ordinals)) == len(columns) and rows.slice == slice(0, columns[0][1].rows)

    @property
    def source(self) -> bytes:
        """The node that owns the shard."""
        return self._owner

    @property
    def complete(self) -> bool:
        """Whether the whole shard is in memory, provided that it has memory."""
        return self._there == [(0, self._size)]

    async def read(self, memory: memoryview) -> None:
        async with self._turn:
            self._there = []
            if self._whole and self.patch is not None and await self.patch(self._encoded, memory):
                check_contents(self._layout, np.frombuffer(memory, np.uint8))
                self._there = [(0, self._size)]
                self._behind = False
            else:
                await self._complete(memory, fresh=True)

    async def add(self, memory: memoryview) -> None:
        """Fetch the wanted parts that are missing from `memory`. Raises as `ShardReads.read`."""
        async with self._turn:
            await self._complete(memory, fresh=False)

    async def _complete(self, memory: memoryview, *, fresh: bool) -> None:
        array = np.frombuffer(memory, np.uint8)
        everything = [(0, self._size)]
        if not self._whole:
            if not self._there:
                await self._fetch(memory, tables(self._layout), fresh=fresh)
                check_contents(self._layout, array)
            seen = len(self._wants)
            wanted = merged(each for want in self._wants for each in self._wanted(want, array))
            # A reader of byte ranges will not ask for others: ranges are fetched if they cost less than the whole. A
            # reader of rows often will: ranges must cost less than half.
            worth = 1 if all(isinstance(want, bytes) for want in self._wants) else 2
            if worth * (total(wanted) + _NAMING * len(wanted)) < self._size and len(wanted) <= _MOST_RANGES:
                await self._fetch(memory, wanted, fresh=fresh)
                self._behind = len(self._wants) > seen
                return
        await self._fetch(memory, everything, fresh=fresh)
        check_contents(self._layout, array)
        self._behind = False

    def _wanted(self, want: Want, memory: Bytes) -> ByteRanges:
        if isinstance(want, bytes):
            return self._ranges(want)
        ordinals, rows, cut = want
        return values(self._layout, ordinals, rows, memory, cuts.decode(cut, len(rows)))

    async def _fetch(self, memory: memoryview, wanted: ByteRanges, *, fresh: bool) -> None:
        missing = without(wanted, self._there)
        if missing:
            whole = total(self._there) + total(missing) == self._size
            asked = WantedRanges(self._owner, self._shard, memory, missing, self._there, whole, fresh)
            came = await self._reading.read(asked)
            self._there = merged([*self._there, *came], gap=0)
