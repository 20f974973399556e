"""The nodes that a partition considers lost, with the shards that they stored, as part of its state.

When a node returns, its older shards stay lost; those from a certain number on exist. The last lost nodes are
remembered.
"""

from __future__ import annotations

from collections.abc import Iterable

from dataplane.errors import OwnerDied

ALL = (1 << 63) - 1
"""A number above that of every shard."""

MAX_LOST = 4096
"""Nodes that are remembered."""


class LostNodes:
    """The lost nodes. A node is `in` this until it returns."""

    def __init__(self, state: Iterable[tuple[bytes, int]] = ()) -> None:
        self._before = dict(state)
        self.away = {node for node, before in self._before.items() if before == ALL}

    def __bool__(self) -> bool:
        return bool(self._before)

    def __contains__(self, node: object) -> bool:
        return node in self.away

    def there(self, node: bytes, shard: int) -> bool:
        """Whether this shard was not lost with its node. The shard ALL: whether the node is not away."""
        return shard >= self._before.get(node, 0) and node not in self.away

    def require(self, shards: Iterable[tuple[bytes, int]]) -> None:
        """Raises OwnerDied if one of these shards of nodes was lost."""
        for node, shard in shards:
            if not self.there(node, shard):
                raise OwnerDied(f"node {node.hex()} was lost, and what it stored: put this again", node=node.hex())

    def lose(self, node: bytes, before: int = ALL) -> None:
        """Mark a node's shards below this number as lost; by default all, and the node as away."""
        before = max(before, self._before.pop(node, 0))
        self._before[node] = before
        if before == ALL:
            self.away.add(node)
        if len(self._before) > MAX_LOST:
            oldest = next(iter(self._before))
            del self._before[oldest]
            self.away.discard(oldest)

    def come_back(self, node: bytes, first: int) -> None:
        """Readmit a node with its shards from number `first` on."""
        if node in self.away:
            self.away.remove(node)
            del self._before[node]
            if first > 0:
                self._before[node] = first

    def state(self) -> list[tuple[bytes, int]]:
        """The state for a snapshot."""
        return list(self._before.items())
