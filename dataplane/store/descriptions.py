"""Descriptions of a node's shards for clients and other nodes: sizes, layouts, live rows, bytes of small ones."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from dataplane.batch.layout import aligned
from dataplane.batch.layout_check import CheckedLayout, check_layout
from dataplane.errors import Corrupt
from dataplane.store.arena import Arena
from dataplane.store.live_cells import LiveBlock
from dataplane.store.shard import check_cost
from dataplane.store.shards import Shards

_layout_of = attrgetter("layout")
_PLACE = 64  # bytes: an upper bound for a shard's description without its layout


class Descriptions:
    """Descriptions of the shards of one store. All methods raise Freed or Corrupt as `Store.pin`."""

    def __init__(self, shards: Shards, arena: Arena) -> None:
        self._shards = shards
        self._arena = arena

    def describe(self, numbers: Sequence[int]) -> list[tuple[int, int, int, bytes, list[LiveBlock]]]:
        """For each shard: its bytes, rows, columns, encoded layout and live blocks."""
        shards = self._shards.find_all(numbers)
        return [(s.size, s.rows, s.columns, s.layout, s.live_blocks()) for s in shards]

    def nbytes(self, numbers: Sequence[int]) -> int:
        """The approximate bytes of the description of these shards."""
        shards = self._shards.find_all(numbers)
        layouts = set(map(_layout_of, shards))
        lives = sum([s.live.nbytes for s in shards if s.live is not None])
        return _PLACE * len(shards) + sum(map(len, layouts)) + lives

    def payload(self, number: int, most: int) -> bytes:
        """The bytes of a shard if it is in memory and has at most `most` bytes; else none."""
        shard = self._shards.find(number)
        if shard.extent is None or shard.size > most:
            return b""
        return self._arena.read(shard.extent)[: shard.size]


def check_described(size: int, rows: int, columns: int, layout: bytes) -> CheckedLayout:
    """The layout of a shard that is elsewhere. Raises ProtocolMismatch, Corrupt or LimitExceeded if its description
    is invalid."""
    described = check_layout(layout, size)
    check_cost(described, layout, size)
    if aligned(size) != size or (rows, columns) != (described.rows, len(described.outline.columns)):
        raise Corrupt("a shard that is described falsely")
    return described
