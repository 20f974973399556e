"""What runs, and needs other hosts for it: it ends when one of them has gone, and not when its streams find out.

What always holds: who is told so gets TimeoutError, which is none of its caller's cancellations; nothing that has ended
is remembered.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dataplane.cluster.membership import Membership


class Running:
    """What runs in one node. To be used from its event loop."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._ends: defaultdict[bytes, set[asyncio.Timeout]] = defaultdict(set)
        membership.watch(self._changed)

    @asynccontextmanager
    async def needing(self, *nodes: bytes) -> AsyncIterator[None]:
        """What is done within needs these nodes. Raises TimeoutError as soon as one of them is no member."""
        async with asyncio.timeout(None) as end:
            for node in nodes:
                self._ends[node].add(end)
            self._changed()
            try:
                yield
            finally:
                for node in set(nodes):
                    self._ends[node].discard(end)
                    if not self._ends[node]:
                        del self._ends[node]

    def _changed(self) -> None:
        now = asyncio.get_running_loop().time()
        for node in self._ends.keys() - self._membership.members.keys():
            for end in self._ends[node]:
                if end.when() is None:  # it has not been told yet
                    end.reschedule(now)
