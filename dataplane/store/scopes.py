"""Shards by the scope that they were put under, which are freed together.

Invariants: a scope without shards does not exist.
"""

from __future__ import annotations

from collections.abc import Iterable

from dataplane.store.shard import Shard
from dataplane.store.shards import Shards


class Scopes:
    """The scopes of one store. The field of a shard names its scope."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self._scopes: dict[str, set[int]] = {}

    def add(self, shard: Shard) -> None:
        """Add a new shard to its scope, if it names one."""
        if shard.scope:
            self._scopes.setdefault(shard.scope, set()).add(shard.number)

    def remove(self, numbers: Iterable[int]) -> None:
        """Take these shards out of their scopes. Freed ones are ignored."""
        for number in numbers:
            shard = self._shards.get(number)
            if shard is not None and shard.scope:
                others = self._scopes[shard.scope]
                others.discard(number)
                if not others:
                    del self._scopes[shard.scope]
                shard.scope = ""

    def __getitem__(self, scope: str) -> list[int]:
        """The shards that were put under the scope and not freed. An unknown scope has none."""
        return list(self._scopes.get(scope, ()))
