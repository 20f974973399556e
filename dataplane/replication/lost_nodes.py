"""The nodes that a partition considers lost, with the shards that they stored, as part of its state.

A node that returns is not lost any more, and what it stores from some shard on exists. The last lost nodes are
remembered.
"""

from __future__ import annotations

from collections.abc import Iterable

ALL = (1 << 63) - 1
"""A number higher than every shard's."""

MAX_LOST = 4096
"""Nodes that are remembered."""


class LostNodes:
    """A node is `in` this while it is away."""

    def __init__(self, state: Iterable[tuple[bytes, int]] = ()) -> None:
        self._before = dict(state)
        self.away = {node for node, before in self._before.items() if before == ALL}

    def __bool__(self) -> bool:
        return bool(self._before)

    def __contains__(self, node: object) -> bool:
        return node in self.away

    def has(self, node: bytes, shard: int) -> bool:
        """Whether this shard was lost with its node."""
        return shard < self._before.get(node, 0)

    def lose(self, node: bytes, before: int = ALL) -> None:
        """A node is lost, with its shards below this number."""
        before = max(before, self._before.pop(node, 0))
        self._before[node] = before
        if before == ALL:
            self.away.add(node)
        if len(self._before) > MAX_LOST:
            oldest = next(iter(self._before))
            del self._before[oldest]
            self.away.discard(oldest)

    def come_back(self, node: bytes, first: int) -> None:
        """A node has returned, with its shards from this number on."""
        if node in self.away:
            self.away.remove(node)
            del self._before[node]
            if first > 0:
                self._before[node] = first

    def state(self) -> list[tuple[bytes, int]]:
        """The state for a snapshot."""
        return list(self._before.items())
