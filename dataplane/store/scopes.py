"""Shards by the scope that they were put under, which are freed together.

Invariants: a scope that has no shards is not there.
"""

from __future__ import annotations

from dataplane.store.shard import Shard


class Scopes:
    """The scopes of one store. A shard's own field says which it is under."""

    def __init__(self) -> None:
        self._shards: dict[str, set[int]] = {}

    def add(self, shard: Shard) -> None:
        """A new shard, under its scope if it names one."""
        if shard.scope:
            self._shards.setdefault(shard.scope, set()).add(shard.number)

    def remove(self, shard: Shard) -> None:
        """The shard is under no scope from now on."""
        if shard.scope:
            shards = self._shards[shard.scope]
            shards.discard(shard.number)
            if not shards:
                del self._shards[shard.scope]
            shard.scope = ""

    def __getitem__(self, scope: str) -> list[int]:
        """The shards that are under the scope."""
        return list(self._shards.get(scope, ()))
