"""What one client put and is about to hand to a stream: freed if the client goes before it has.

A put belongs to the node, and outlives its process. But who calls `append` with a reference has given it away: were its
process killed while it waits for room in the stream, nobody would ever free it.

What always holds: only what this client put, under no scope, is freed so, and nothing that rows of streams need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dataplane.errors import LimitExceeded

_MOST = 1 << 16  # shards of a client


class Handing:
    """Shards by the request that asks leave to append them. `free(shards)` frees those that the client may free."""

    def __init__(self, free: Callable[[Sequence[int]], None]) -> None:
        self._free = free
        self._shards: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._shards.values()))

    def begin(self, request: int, shards: list[int]) -> None:
        """These are to be appended by leave of this request. Raises LimitExceeded."""
        if shards:
            asked = len(self) + len(shards)
            if asked > _MOST:
                what = "shards that a client is about to append"
                raise LimitExceeded(f"{asked} {what}", what=what, asked=asked, limit=_MOST)
            self._shards[request] = shards

    def end(self, request: int) -> None:
        """They are a stream's now, or the client's still."""
        self._shards.pop(request, None)

    def leave(self) -> None:
        """The client has gone."""
        shards, self._shards = self._shards, {}
        for each in shards.values():
            self._free(each)
