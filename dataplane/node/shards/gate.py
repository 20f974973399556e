"""So many at a time, and of each party no more than its part; who has to wait comes in turn.

What always holds: no more than `most` are inside, and no more than `each` of one party; a party that has asked for a
thousand turns delays another's first by one, not by a thousand; nobody waits who could go in.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class Gate:
    """Who is inside, and who waits. To be used from one event loop."""

    def __init__(self, most: int, each: int) -> None:
        self._most = most
        self._each = each
        self._inside: Counter[Hashable] = Counter()
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return self._inside.total()

    @asynccontextmanager
    async def turn(self, who: Hashable) -> AsyncIterator[None]:
        """Inside as long as this is."""
        await self.enter(who)
        try:
            yield
        finally:
            self.leave(who)

    async def enter(self, who: Hashable) -> None:
        """Wait for a turn; `leave` ends it. Cancelled, it takes none."""
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
        """A turn has ended: the next comes in."""
        self._inside[who] -= 1
        if not self._inside[who]:
            del self._inside[who]
        for party in list(self._waiting):
            if self._free(party):
                self._admit_one(party)

    def _admit_one(self, who: Hashable) -> None:
        """The first who still wants to; the others of its party come after everybody else's."""
        queue = self._waiting.pop(who)
        while queue:
            admitted = queue.popleft()
            if not admitted.done():
                self._inside[who] += 1
                admitted.set_result(None)
                break
        if queue:
            self._waiting[who] = queue
