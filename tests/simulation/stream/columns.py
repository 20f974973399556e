"""Which lives of nodes store columns, and which of those are over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.stream.node import Node


class Columns:
    """Of all partitions. What a durable node stores is there again when it is."""

    def __init__(self, nodes: Sequence[Node], *, durable: bool) -> None:
        self._nodes = nodes
        self._durable = durable
        self._shards = 0
        self.dead: set[bytes] = set()
        self.died: Callable[[bytes], None] = lambda node: None
        """Called with a life that is over."""

    def life(self, node: Node) -> bytes:
        return b"n%d-%05d" % (node.number, 0 if self._durable else node.life)

    def store(self, rng: Random) -> tuple[bytes, int, tuple[bytes, ...]]:
        """Where a column is put: the node, a shard that nobody had before, and other nodes with a copy of it."""
        self._shards += 1
        there = [node for node in self._nodes if node.up] or list(self._nodes)
        node = rng.choice(there)
        copies = [other for other in there if other is not node and rng.random() < 0.3]
        return self.life(node), self._shards, tuple(self.life(copy) for copy in copies)

    def crashed(self, node: Node) -> None:
        if not self._durable:
            life = self.life(node)
            self.dead.add(life)
            self.died(life)
