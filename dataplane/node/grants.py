"""The segments whose descriptors a client has: each once for each right, read, or write as its owner."""

from __future__ import annotations

from collections.abc import Iterable

from dataplane.store.arena import Arena
from dataplane.wire import messages as m


class Grants:
    """Which segments of the arena one client may map."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._granted: set[tuple[int, bool]] = set()
        self._closed = arena.closed

    def new(self, segments: Iterable[int], *, writable: bool) -> tuple[list[m.SegmentGrant], list[int]]:
        """Grants for the segments that the client does not have yet, and their descriptors. The arena keeps these
        open."""
        grants, descriptors = [], []
        for number in segments:
            if (number, writable) not in self._granted:
                self._granted.add((number, writable))
                segment = self._arena[number]
                grants.append(m.SegmentGrant(number, segment.size, writable))
                descriptors.append(segment.fd if writable else segment.readonly_fd)
        return grants, descriptors

    def gone(self) -> list[int]:
        """The granted segments that were closed since the last call."""
        if self._closed == self._arena.closed:
            return []
        self._closed = self._arena.closed
        gone = {number for number, _ in self._granted if number not in self._arena}
        self._granted = {grant for grant in self._granted if grant[0] not in gone}
        return sorted(gone)
