"""A shard: one sealed, immutable object of the store. Some of its rows may have been freed.

The fields `extent` and `file` locate its bytes. `file` is a file on this host's disk, or a `Backing`, from which the
bytes can be read again. A `DurableShard` stays in `file` until the shard is freed.

    extent      file        the shard is
    set         None        in memory only ("dirty": it must be written before its memory can be taken)
    set         set         in both ("clean": its memory can be taken at once)
    None        set         on disk only
    None        None        gone; only a freed shard is

While `moving` is set, the shard is being written or read. Only the end of this move changes the two fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dataplane.batch.layout_check import CheckedLayout
from dataplane.batch.rows import RowIndices
from dataplane.errors import Corrupt, DataplaneError, LimitExceeded
from dataplane.store.arena import Extent, pages
from dataplane.store.durable.shards import DurableShard
from dataplane.store.extents import RangeSet
from dataplane.store.links import Links
from dataplane.store.live_cells import LiveBlock, LiveCells
from dataplane.store.spill_file import SpillFile

_LAYOUT = 16 << 10  # bytes of layout that even the smallest shard may have
_CELLS = 1 << 20  # columns times rows that even the smallest shard may have


def check_cost(layout: CheckedLayout, encoded: bytes, size: int) -> None:
    """Raises Corrupt if the columns of a shard overlap, and LimitExceeded if its layout or its number of rows is too
    large for its `size` in bytes: such a shard would cost a node more work or memory than its bytes justify."""
    if layout.claimed > size:
        raise Corrupt(f"the columns of a shard claim more bytes than the {size} that it has")
    cells = layout.rows * len(layout.outline.columns)
    for what, asked, limit in (("layout", len(encoded), max(_LAYOUT, size)), ("rows", cells, max(_CELLS, size))):
        if asked > limit:
            raise LimitExceeded(f"the {what} of a shard of {size} bytes", what=what, asked=asked, limit=limit)


class Backing(Protocol):
    """A source from which the bytes of a shard can be read again, other than this host's disk: for example the shard on
    another host."""

    async def read(self, memory: memoryview) -> None:
        """Fill the memory, which is as long as the extent of the shard, with validated bytes. After a DataplaneError
        the bytes are not used, and the shard raises this error until `Shards.clear_error`."""


@dataclass(slots=True, eq=False)
class Shard:
    """A shard's location and history. `size`: its bytes, rounded up to a multiple of 64, or to whole pages if a client
    wrote them into a reservation. `next_use`: the rank of its estimated next read; greater ranks go to disk first.
    `damage`: the error of its last read, which `Shards.find` raises."""

    number: int
    size: int
    rows: int
    columns: int
    layout: bytes
    holder: str
    scope: str
    next_use: int
    extent: Extent | None = None
    file: SpillFile | Backing | None = None
    moving: asyncio.Future[None] | None = None
    freed: bool = False
    damage: DataplaneError | None = None
    live: LiveCells | None = None
    """The cells that were not freed; None: all."""
    holes: RangeSet | None = field(default=None)
    """The bytes of its extent that went back to the host because their rows were freed; they read as zeros."""
    unpunched: bool = False
    """Whether rows were freed whose memory goes back to the host when the last pin is dropped."""
    links: Links | None = None
    """Its owners if rows of it were retained; None: the client that put it is the only one."""
    next_link: int = 1
    """The number of its next link while it has no `links`."""
    shared: bool = False
    """Whether its extent shares pages with other shards; otherwise the extent has `room` bytes of whole pages."""
    owner: str = ""
    """The stream or table that needed it last, for statistics; empty if none does."""
    since_s: float = 0.0
    """The time of the store's clock at which the shard was added."""

    @property
    def room(self) -> int:
        """Its size, rounded up to whole pages: its bytes on disk, and in memory after it was read back."""
        return pages(self.size)

    @property
    def held(self) -> int:
        if self.shared:
            return self.size
        return self.room if self.holes is None else self.room - self.holes.covered(0, self.room)

    @property
    def ours(self) -> bool:
        """Whether its bytes are in the arena, a spill file or a durable file only, not in a `Backing`."""
        return self.file is None or isinstance(self.file, SpillFile | DurableShard)

    @property
    def clean(self) -> bool:
        """Whether its memory can be taken without writing first."""
        return self.extent is not None and self.file is not None

    @property
    def coming(self) -> bool:
        """Whether it is in memory, or being read or written."""
        return self.extent is not None or self.moving is not None

    def free_part(self, columns: Sequence[int], rows: RowIndices) -> bool:
        """Mark these columns of these rows as freed. Returns whether nothing is left of the shard.

        Raises IndexError if the shard has no such column or row.
        """
        self.check_part(columns, rows)
        if self.live is None:
            if len(set(columns)) == self.columns and rows.slice == slice(0, self.rows):
                return True
            self.live = LiveCells(self.columns, self.rows)
        self.live.free(columns, rows)
        return not self.live

    def check_part(self, columns: Sequence[int], rows: RowIndices) -> None:
        """Raises IndexError if the shard has no such column or row."""
        if any(not 0 <= column < self.columns for column in columns) or rows.stop > self.rows:
            raise IndexError(f"shard {self.number} has {self.columns} columns of {self.rows} rows")

    def live_blocks(self) -> list[LiveBlock]:
        """The blocks of `live` of which rows were freed; empty if all cells are live."""
        return [] if self.live is None else self.live.blocks
