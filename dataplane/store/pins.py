"""Pins of clients on shards: a pinned shard's bytes stay where they are. All pins of a client are released with it.

Invariant: `holds` is true of a shard exactly while some client has a pin on it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable


class Pins:
    """Counts of pins, by client and by shard."""

    def __init__(self) -> None:
        self._of: dict[Hashable, dict[int, int]] = {}
        self._total: dict[int, int] = {}

    def add_all(self, client: Hashable, shards: Iterable[int]) -> None:
        """Add a pin of the client on each shard."""
        mine, total = self._of.setdefault(client, {}), self._total
        for shard in shards:
            mine[shard] = mine.get(shard, 0) + 1
            total[shard] = total.get(shard, 0) + 1

    def inherit(self, client: Hashable, heir: Hashable) -> None:
        """Add a copy of all pins of the client to the heir's. The client keeps its own."""
        for shard, count in self._of.get(client, {}).items():
            mine = self._of.setdefault(heir, {})
            mine[shard] = mine.get(shard, 0) + count
            self._total[shard] += count

    def drop_all(self, client: Hashable, shards: Iterable[int]) -> list[int]:
        """Release one pin of the client on each shard. Returns the shards whose last pin was released. Missing pins are
        ignored."""
        mine, total = self._of.get(client, {}), self._total
        unheld = []
        for shard in shards:
            count = mine.get(shard, 0)
            if count > 1:
                mine[shard] = count - 1
            elif count:
                del mine[shard]
            else:
                continue
            left = total[shard] - 1
            if left:
                total[shard] = left
            else:
                del total[shard]
                unheld.append(shard)
        return unheld

    def drop_client(self, client: Hashable) -> list[int]:
        """Release all pins of the client. Returns the shards whose last pin was released."""
        mine = self._of.pop(client, {})
        unheld = []
        for shard, count in mine.items():
            self._total[shard] -= count
            if not self._total[shard]:
                del self._total[shard]
                unheld.append(shard)
        return unheld

    def holds(self, shard: int) -> bool:
        return shard in self._total

    def shards(self) -> Iterable[int]:
        return self._total.keys()

    def by_client(self) -> dict[Hashable, list[int]]:
        return {client: list(shards) for client, shards in self._of.items() if shards}
