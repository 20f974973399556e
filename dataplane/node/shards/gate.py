"""A semaphore that is fair between parties.

Invariants: at most `most` are inside, and at most `each` of one party. A party that has asked for a thousand turns
delays another party's first turn by one, not by a thousand. A party that could enter does not wait.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class Gate:
    """The turns inside, and those that wait. Used from one event loop."""

    def __init__(self, most: int, each: int) -> None:
        self._most = most
        self._each = each
        self._inside: Counter[Hashable] = Counter()
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return self._inside.total()

    @asynccontextmanager
    async def turn(self, who: Hashable) -> AsyncIterator[None]:
        """A context that is inside the gate."""
        await self.enter(who)
        try:
            yield
        finally:
            self.leave(who)

    async def enter(self, who: Hashable) -> None:
        """Wait for a turn, which `leave` ends. Cancelled, it takes none."""
        if self._free(who) and who not in self._waiting:
            self._inside[who] += 1
            return
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(who, deque()).append(admitted)
        try:
            await admitted
        except BaseException:
            if admitted.done() and not admitted.cancelled():
                self.leave(who)
            elif admitted in self._waiting.get(who, ()):
                self._waiting[who].remove(admitted)
                if not self._waiting[who]:
                    del self._waiting[who]
            raise

    def _free(self, who: Hashable) -> bool:
        return self._inside.total() < self._most and self._inside[who] < self._each

    def leave(self, who: Hashable) -> None:
        """End a turn, and admit the next."""
        self._inside[who] -= 1
        if not self._inside[who]:
            del self._inside[who]
        for party in list(self._waiting):
            if self._free(party):
                self._admit_one(party)

    def _admit_one(self, who: Hashable) -> None:
        """Admit the first of the party that still waits; the others of that party come after all other parties."""
        queue = self._waiting.pop(who)
        while queue:
            admitted = queue.popleft()
            if not admitted.done():
                self._inside[who] += 1
                admitted.set_result(None)
                break
        if queue:
            self._waiting[who] = queue
