"""The nodes that a partition considers lost, and which of their shards are lost. This is part of the partition's state.

When a node returns, its older shards stay lost; shards from a certain number on count as present. The last
`MAX_LOST_NODES` lost nodes are remembered.
"""

from __future__ import annotations

from collections.abc import Iterable

from dataplane.errors import OwnerDied

ALL = (1 << 63) - 1
"""A number above that of every shard."""

MAX_LOST_NODES = 4096
"""The most nodes that are remembered."""


class LostNodes:
    """The lost nodes. A node is `in` this until it returns."""

    def __init__(self, state: Iterable[tuple[bytes, int]] = ()) -> None:
        self._before = dict(state)
        self.lost = {node for node, before in self._before.items() if before == ALL}

    def __bool__(self) -> bool:
        return bool(self._before)

    def __contains__(self, node: object) -> bool:
        return node in self.lost

    def there(self, node: bytes, shard: int) -> bool:
        """Whether this shard was not lost with its node. For the shard ALL: whether the node is not lost."""
        return shard >= self._before.get(node, 0) and node not in self.lost

    def require(self, shards: Iterable[tuple[bytes, int]]) -> None:
        """Raises OwnerDied if one of these shards, given as (node, number), was lost."""
        for node, shard in shards:
            if not self.there(node, shard):
                raise OwnerDied(f"node {node.hex()} was lost, and what it stored: put this again", node=node.hex())

    def lose(self, node: bytes, before: int = ALL) -> None:
        """Mark a node's shards below this number as lost; by default all of them, and the node itself."""
        before = max(before, self._before.pop(node, 0))
        self._before[node] = before
        if before == ALL:
            self.lost.add(node)
        if len(self._before) > MAX_LOST_NODES:
            oldest = next(iter(self._before))
            del self._before[oldest]
            self.lost.discard(oldest)

    def come_back(self, node: bytes, first: int) -> None:
        """Note that a node has returned, with its shards from number `first` on."""
        if node in self.lost:
            self.lost.remove(node)
            del self._before[node]
            if first > 0:
                self._before[node] = first

    def state(self) -> list[tuple[bytes, int]]:
        """The state for a snapshot."""
        return list(self._before.items())
