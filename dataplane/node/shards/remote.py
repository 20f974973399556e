"""A shard of another host, in the place of the file that a shard of this host may have.

What of it anybody wanted is read: all of a small one, of a larger one the tables of its columns, which are checked, and
the values of the rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import numpy as np

from dataplane.batch.alike import one
from dataplane.batch.layout import check_contents
from dataplane.batch.rows import Rows
from dataplane.batch.stretches import Stretches, merged, tables, total, values, without
from dataplane.errors import Misuse
from dataplane.node.shards.reading import Reading, Wanted

Want = tuple[Sequence[int], Rows]
"""Rows, ascending, of columns by their ordinals."""

_WORTH = 256 << 10  # bytes of a shard from which on less than all of it is fetched
_NAMING = 1 << 10  # bytes that could come in the time that it takes to plan, name and gather a stretch
_MOST_WANTS, _MOST_STRETCHES = 64, 1 << 16


class Remote:
    """A shard of another host, to be read again whenever its memory here was taken: what of it anybody wanted.

    What always holds: what is `_there` is in the memory that the shard has here now; what is wanted only grows.
    """

    def __init__(self, reading: Reading, owner: bytes, shard: int, encoded: bytes, size: int, *, whole: bool) -> None:
        self._reading = reading
        self._owner = owner
        self._shard = shard
        self._layout = one(encoded, size).layout
        self._size = size
        self._whole = size < _WORTH
        self._wants: list[Want] = []
        self._there: Stretches = [(0, size)] if whole else []
        self._turn = asyncio.Lock()

    def want(self, wants: Iterable[Want]) -> bool:
        """Somebody reads these rows of these columns. Whether that was not wanted before. Raises Misuse."""
        new = [want for want in wants if want not in self._wants]
        for ordinals, rows in new:
            columns = self._layout.columns
            if not all(0 <= o < len(columns) for o in ordinals) or rows.stop > columns[0][1].rows:
                raise Misuse(f"shard {self._shard} of node {self._owner.hex()} has not these columns or rows")
        if self._whole or not new:
            return False
        self._wants += new
        self._whole = len(self._wants) > _MOST_WANTS or any(self._everything(*want) for want in new)
        return True

    def covers(self, wants: Iterable[Want]) -> bool:
        """Whether these rows of these columns are there, if any of it is in memory."""
        return self.complete or all(want in self._wants for want in wants)

    def _everything(self, ordinals: Sequence[int], rows: Rows) -> bool:
        columns = self._layout.columns
        return len(set(ordinals)) == len(columns) and rows.slice == slice(0, columns[0][1].rows)

    @property
    def source(self) -> bytes:
        """The node that it is read from."""
        return self._owner

    @property
    def complete(self) -> bool:
        """Whether all of it is there, if any is in memory."""
        return self._there == [(0, self._size)]

    async def read(self, memory: memoryview) -> None:
        async with self._turn:
            self._there = []
            await self._complete(memory, fresh=True)

    async def add(self, memory: memoryview) -> None:
        """Fetch what is wanted and not there. Raises as `Reading.read`."""
        async with self._turn:
            await self._complete(memory, fresh=False)

    async def _complete(self, memory: memoryview, *, fresh: bool) -> None:
        array = np.frombuffer(memory, np.uint8)
        everything = [(0, self._size)]
        if not self._whole:
            if not self._there:
                await self._fetch(memory, tables(self._layout), fresh=fresh)
                check_contents(self._layout, array)
            wanted = merged(s for ordinals, rows in self._wants for s in values(self._layout, ordinals, rows, array))
            if 2 * (total(wanted) + _NAMING * len(wanted)) < self._size and len(wanted) <= _MOST_STRETCHES:
                await self._fetch(memory, wanted, fresh=fresh)
                return
        await self._fetch(memory, everything, fresh=fresh)
        check_contents(self._layout, array)

    async def _fetch(self, memory: memoryview, wanted: Stretches, *, fresh: bool) -> None:
        missing = without(wanted, self._there)
        if missing:
            whole = total(self._there) + total(missing) == self._size
            asked = Wanted(self._owner, self._shard, memory, missing, self._there, whole, fresh)
            came = await self._reading.read(asked)
            self._there = merged([*self._there, *came], gap=0)
