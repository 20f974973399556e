"""Shards by the scope that they were put under, which are freed together.

Invariants: a scope without shards does not exist.
"""

from __future__ import annotations

from dataplane.store.shard import Shard


class Scopes:
    """The scopes of one store. The field of a shard names its scope."""

    def __init__(self) -> None:
        self._shards: dict[str, set[int]] = {}

    def add(self, shard: Shard) -> None:
        """Add a new shard to its scope, if it names one."""
        if shard.scope:
            self._shards.setdefault(shard.scope, set()).add(shard.number)

    def remove(self, shard: Shard) -> None:
        """Take the shard out of its scope."""
        if shard.scope:
            shards = self._shards[shard.scope]
            shards.discard(shard.number)
            if not shards:
                del self._shards[shard.scope]
            shard.scope = ""

    def __getitem__(self, scope: str) -> list[int]:
        """The shards of the scope."""
        return list(self._shards.get(scope, ()))
