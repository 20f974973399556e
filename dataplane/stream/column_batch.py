"""The columns that one append or extend brought, and the nodes that have them.

A patch is a reference whose rows are rows of the stream. Invariant: `nodes` store its columns and `spares` have
copies; a row of it is lost once some of its columns are on none of these nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.replication.lost_nodes import ALL
from dataplane.stream.page import Flags, Index

Hold: TypeAlias = int | Index
There: TypeAlias = Callable[[bytes, int], bool]
"""Tells whether a shard of a node still exists."""


@dataclass(slots=True, eq=False)
class ColumnBatch:
    """The columns of one append or extend. `left`: how many rows of the stream, and readers of replaced columns,
    need it. `hold`: the delivery number under which its producer held the rows, one for all or one each; -1 for
    none."""

    ref: BatchRef
    left: int
    hold: Hold = -1
    spares: tuple[bytes, ...] = ()
    nodes: tuple[bytes, ...] = ()
    """Those that its columns are stored on. `spares` have all of it too."""
    encoded: bytes = b""
    """The reference as bytes, once somebody has asked for it."""
    pieces: tuple[ColumnBatch, ...] = ()
    """Of a row that came piece by piece: what brought each; the reference is the first's until the row is finished."""

    def __post_init__(self) -> None:
        self.nodes = tuple(dict.fromkeys(node for node, _ in self.ref.shards()))

    @classmethod
    def whole(cls, ref: BatchRef, pieces: tuple[ColumnBatch, ...]) -> ColumnBatch:
        """The patch of a row of these pieces, which `ref` joins."""
        return cls(ref, 1, pieces=pieces)

    @property
    def nbytes(self) -> int:
        """The bytes stored for it."""
        return sum(each.nbytes for each in self.pieces) if self.pieces else self.ref.stored_nbytes

    @property
    def each(self) -> tuple[ColumnBatch, ...]:
        """Its pieces, or itself if it has none."""
        return self.pieces or (self,)

    def encode(self) -> bytes:
        """The reference as bytes."""
        self.encoded = self.encoded or self.ref.encode()
        return self.encoded

    def forget_spare(self, node: bytes) -> None:
        """This node has no copies any more."""
        self.spares = tuple(spare for spare in self.spares if spare != node)
        for piece in self.pieces:
            piece.forget_spare(node)

    def _in(self, which: There) -> Flags:
        """The rows of the reference that have some column in one of these shards."""
        flags = np.zeros(len(self.ref), np.bool_)
        for name in self.ref.columns:
            pieces, order = self.ref.sources(name)
            found = np.repeat([which(piece.node, piece.shard) for piece in pieces], [len(p.rows) for p in pieces])
            flags |= found if order is None else found[order]
        return flags

    def lives(self, there: There) -> bool:
        """Whether all of its columns still exist, given which shards do."""
        if self.pieces:
            return all(piece.lives(there) for piece in self.pieces)
        stored = all(there(node, shard) for node, shard in self.ref.shards())
        return stored or any(there(spare, ALL) for spare in self.spares)

    def lost(self, there: There, index: Index) -> Flags:
        """Those of these rows of the reference of which some column no longer exists. For a patch that does not
        live."""
        if self.pieces:
            return np.ones(len(index), np.bool_)
        return self._in(lambda node, shard: not there(node, shard))[index]
