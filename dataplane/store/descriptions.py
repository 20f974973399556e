"""Descriptions of a node's shards for clients and other nodes: sizes, layouts, live rows, bytes of small ones."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from dataplane.batch.layout import aligned
from dataplane.batch.layout_check import CheckedLayout, check_layout
from dataplane.errors import Corrupt, ProtocolMismatch
from dataplane.store.arena import Arena
from dataplane.store.shard import Shard, check_cost
from dataplane.store.shards import Shards

_layout_of = attrgetter("layout")
_PLACE = 64  # bytes: an upper bound for a shard's description without its layout


class Descriptions:
    """Descriptions of the shards of one store. All methods raise Freed or Corrupt as `Store.pin`."""

    def __init__(self, shards: Shards, arena: Arena) -> None:
        self._shards = shards
        self._arena = arena

    def describe(self, numbers: Sequence[int], *, apart: bool = False) -> list[tuple[int, int, int, bytes, bytes]]:
        """For each shard: its bytes, rows, columns, encoded layout and live bits. `apart`: without large live bits,
        which are sent separately."""
        shards = self._shards.find_all(numbers)
        return [(s.size, s.rows, s.columns, s.layout, b"" if apart and _is_large(s) else s.live_bits()) for s in shards]

    def apart(self, number: int) -> bool:
        """Whether the live bits of a shard are so large that they are sent separately."""
        return _is_large(self._shards.find(number))

    def nbytes(self, numbers: Sequence[int], *, apart: bool) -> int:
        """The approximate bytes of the description of these shards; `apart`: without live bits that are sent
        separately."""
        shards = self._shards.find_all(numbers)
        layouts = set(map(_layout_of, shards))
        lives = [s.live for s in shards if s.live is not None]
        told = sum([live.encoded for live in lives if not (apart and live.large)])
        return _PLACE * len(shards) + sum(map(len, layouts)) + told

    def live(self, number: int, column: int, first: int, count: int) -> bytes:
        """The live bits of these rows of a column, one bit a row; empty if all are live. Raises ProtocolMismatch for
        rows that the column does not have."""
        shard = self._shards.find(number)
        if not (0 <= column < shard.columns and first >= 0 and 0 < count <= shard.rows - first):
            raise ProtocolMismatch(
                f"shard {number} has {shard.columns} columns of {shard.rows} rows, and the request names others"
            )
        return b"" if shard.live is None else shard.live.bits(column, first, first + count)

    def payload(self, number: int, most: int) -> bytes:
        """The bytes of a shard if it is in memory and has at most `most` bytes; else none."""
        shard = self._shards.find(number)
        if shard.extent is None or shard.size > most:
            return b""
        return self._arena.read(shard.extent)[: shard.size]


def _is_large(shard: Shard) -> bool:
    return shard.live is not None and shard.live.large


def check_described(size: int, rows: int, columns: int, layout: bytes) -> CheckedLayout:
    """The layout of a shard that is elsewhere. Raises ProtocolMismatch, Corrupt or LimitExceeded if its description
    is invalid."""
    described = check_layout(layout, size)
    check_cost(described, layout, size)
    if aligned(size) != size or (rows, columns) != (described.rows, len(described.outline.columns)):
        raise Corrupt("a shard that is described falsely")
    return described
