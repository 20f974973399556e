"""Shards that a client has put and is about to append to a stream. They are freed if the client ends first.

Shards outlive the process that put them. Without this, the shards of a process that is killed while its `append` of a
reference waits for room would never be freed.

Invariant: only shards that the client itself put without a scope, and that no row of a stream needs, are freed here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dataplane.errors import LimitExceeded

_MOST = 1 << 16  # shards of a client


class PendingShards:
    """Shards by the request for the permit to append them. `free(shards)` frees those of them that this client may
    free."""

    def __init__(self, free: Callable[[Sequence[int]], None]) -> None:
        self._free = free
        self._shards: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._shards.values()))

    def begin(self, request: int, shards: list[int]) -> None:
        """Note shards that are to be appended once the request of this id has got a permit (`stream.admission`).
        Raises LimitExceeded."""
        if shards:
            asked = len(self) + len(shards)
            if asked > _MOST:
                what = "shards that a client is about to append"
                raise LimitExceeded(f"{asked} {what}", what=what, asked=asked, limit=_MOST)
            self._shards[request] = shards

    def end(self, request: int) -> None:
        """Forget the shards of this request: they were appended, or remain the client's."""
        self._shards.pop(request, None)

    def leave(self) -> None:
        """Free all noted shards: the client has ended."""
        shards, self._shards = self._shards, {}
        for each in shards.values():
            self._free(each)
