"""Columns of rows that came together: what one append or extend brought, and on which nodes it is.

A patch is a reference whose rows are rows of the stream. What always holds: `nodes` store its columns and `spares` have
copies; a row of it is lost when something of it is on none of them any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from dataplane.batch.ref import BatchRef, ShardKey
from dataplane.stream.page import Flags, Index

Hold: TypeAlias = int | Index
There: TypeAlias = Callable[[bytes, int], bool]
"""Whether a node has this shard, as far as streams count on it."""

_SPARE = (1 << 63) - 1  # any shard of a node, from now on


@dataclass(slots=True, eq=False)
class Patch:
    """What one append or extend brought. `left` rows of the stream, and readers of what was replaced, still need it.
    `hold`: under which number its rows were delivered to who brought it, for all or for each; -1: under none."""

    ref: BatchRef
    left: int
    hold: Hold = -1
    spares: tuple[bytes, ...] = ()
    shards: tuple[ShardKey, ...] = ()
    nodes: tuple[bytes, ...] = ()
    """Those that its columns are stored on. `spares` have columns too that others of them store."""
    partial: dict[bytes, Flags] = field(default_factory=dict)
    """Which rows of the reference a spare has, where that is not all."""
    encoded: bytes = b""
    """The reference as bytes, once somebody has asked for it."""

    def __post_init__(self) -> None:
        self.shards = self.ref.shards()
        self.nodes = tuple(dict.fromkeys(node for node, _ in self.shards))

    def encode(self) -> bytes:
        """The reference as bytes."""
        self.encoded = self.encoded or self.ref.encode()
        return self.encoded

    def add_spare(self, node: bytes, index: Index) -> None:
        """This node has these rows of the reference too. It may store others itself: what several nodes stored comes
        together in one patch."""
        if self.nodes == (node,):
            return
        if node not in self.spares:
            self.spares = (*self.spares, node)
            self.partial[node] = self._none()
        if node in self.partial:
            self.partial[node][index] = True
            if self.partial[node].all():
                del self.partial[node]

    def forget_spare(self, node: bytes) -> None:
        """This node has none any more of what others store."""
        self.spares = tuple(spare for spare in self.spares if spare != node)
        self.partial.pop(node, None)

    def spared(self, node: bytes, index: Index) -> Flags:
        """Which of these rows of the reference this spare has."""
        return self.partial[node][index] if node in self.partial else np.ones(len(index), np.bool_)

    def _none(self) -> Flags:
        return np.zeros(len(self.ref), np.bool_)

    def on(self, node: bytes, index: Index) -> Flags:
        """Of which of these rows of the reference something is stored on this node: not of all, where what several
        nodes stored came together."""
        if self.nodes == (node,):
            return np.ones(len(index), np.bool_)
        return self._in(lambda where, _: where == node)[index]

    def _in(self, which: There) -> Flags:
        """Of which rows of the reference something is in one of these shards."""
        flags = self._none()
        for name in self.ref.columns:
            pieces, order = self.ref.sources(name)
            found = np.repeat([which(piece.node, piece.shard) for piece in pieces], [len(p.rows) for p in pieces])
            flags |= found if order is None else found[order]
        return flags

    def lives(self, there: There) -> bool:
        """Whether all of its columns are somewhere, given which shards are there."""
        whole = (node for node in self.spares if node not in self.partial)
        return all(there(*shard) for shard in self.shards) or any(there(node, _SPARE) for node in whole)

    def lost(self, there: There, index: Index) -> Flags:
        """Of which of these rows of the reference, which does not live, something is gone."""
        gone = self._in(lambda node, shard: not there(node, shard))
        for node, has in self.partial.items():
            if there(node, _SPARE):
                gone &= ~has
        return gone[index]
