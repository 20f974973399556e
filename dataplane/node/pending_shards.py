"""Shards that a client has put and is about to give to a stream: freed if the client ends first.

A put belongs to the node and outlives its process. A caller of `append` with a reference gives it to the stream: if its
process were killed while it waits for room, nobody would free the shards.

Invariant: this frees only shards that the client itself put, under no scope, and that no row of a stream needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dataplane.errors import LimitExceeded

_MOST = 1 << 16  # shards of a client


class PendingShards:
    """Shards by the request that asks for a permit to append them. `free(shards)` frees those that the client may
    free."""

    def __init__(self, free: Callable[[Sequence[int]], None]) -> None:
        self._free = free
        self._shards: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._shards.values()))

    def begin(self, request: int, shards: list[int]) -> None:
        """These shards are to be appended with the permit of this request. Raises LimitExceeded."""
        if shards:
            asked = len(self) + len(shards)
            if asked > _MOST:
                what = "shards that a client is about to append"
                raise LimitExceeded(f"{asked} {what}", what=what, asked=asked, limit=_MOST)
            self._shards[request] = shards

    def end(self, request: int) -> None:
        """The shards now belong to a stream, or still to the client."""
        self._shards.pop(request, None)

    def leave(self) -> None:
        """The client has ended."""
        shards, self._shards = self._shards, {}
        for each in shards.values():
            self._free(each)
