"""Returns the memory of freed rows to the host, while other rows of their shard exist."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dataplane.batch.layout_check import check_layout
from dataplane.batch.rows import RowIndices
from dataplane.store.arena import Arena
from dataplane.store.live_cells import dead_pages
from dataplane.store.pins import Pins
from dataplane.store.residency import Residency
from dataplane.store.shard import Shard


class HolePunching:
    """Punches holes in the shards of one store. A pinned shard gets its holes when its last pin is dropped."""

    def __init__(self, arena: Arena, residency: Residency, pins: Pins) -> None:
        self._arena = arena
        self._residency = residency
        self._pins = pins
        self._pinned: set[int] = set()  # shards that are pinned and partly freed

    def freed(self, shard: Shard, columns: Sequence[int], rows: RowIndices) -> None:
        """Return the memory of these freed rows, now or when the last pin of the shard is dropped."""
        if self._pins.holds(shard.number):
            self._pinned.add(shard.number)
        else:
            self._punch(shard, columns, rows)

    def unpinned(self, shard: Shard) -> None:
        """Return the memory of freed rows of the shard, whose last pin was dropped."""
        if shard.number in self._pinned:
            self._pinned.discard(shard.number)
            self._punch(shard, range(shard.columns), RowIndices.range(0, shard.rows))

    def forget(self, shard: Shard) -> None:
        self._pinned.discard(shard.number)

    def _punch(self, shard: Shard, columns: Sequence[int], rows: RowIndices) -> None:
        """Return the memory of freed rows of a dirty shard. A shard that is on disk too gets no holes, because all
        of its memory can be taken."""
        if shard.extent is None or shard.file is not None or shard.moving is not None or shard.live is None:
            return
        if shard.shared:  # its pages are returned with the last shard in them
            return
        layout = check_layout(shard.layout, shard.size).layout
        with self._arena.view(shard.extent) as view:
            memory = np.frombuffer(view, dtype=np.uint8)
            parts = [each for column in set(columns) for each in dead_pages(layout, column, shard.live, rows, memory)]
            del memory
        self._residency.punch(shard, parts)
