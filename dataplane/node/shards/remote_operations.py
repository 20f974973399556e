"""Operations that need other hosts. Each is aborted as soon as a node that it needs leaves the cluster or does not
answer a ping, even before the connection to that node fails.

A node is pinged every second while it is needed: if its host becomes unreachable, though the node may be alive, the
operations must end soon.

Invariants: an aborted operation raises TimeoutError, so it is never mistaken for a cancellation by the caller;
operations that have ended are forgotten.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from dataplane.cluster.membership import Membership

_LOOK_S = 1.0  # between pings


class RemoteOperations:
    """The operations of one node. Used from its event loop."""

    def __init__(self, membership: Membership, answers: Callable[[bytes], Awaitable[bool]]) -> None:
        """`answers(node)`: whether a member answers, within a few seconds."""
        self._membership = membership
        self._answers = answers
        self._ends: defaultdict[bytes, set[asyncio.Timeout]] = defaultdict(set)
        self._asking: dict[bytes, asyncio.Task[None]] = {}
        membership.watch(self._changed)

    @asynccontextmanager
    async def needing(self, *nodes: bytes) -> AsyncIterator[None]:
        """A context that needs these nodes. Raises TimeoutError as soon as one of them is no member, or does not
        answer."""
        async with asyncio.timeout(None) as end:
            for node in nodes:
                self._ends[node].add(end)
                if node not in self._asking:
                    self._asking[node] = asyncio.get_running_loop().create_task(self._ask(node))
            self._changed()
            try:
                yield
            finally:
                for node in set(nodes):
                    self._ends[node].discard(end)
                    if not self._ends[node]:
                        del self._ends[node]
                        self._asking.pop(node).cancel()

    async def _ask(self, node: bytes) -> None:
        """Ping this node while it is needed."""
        while True:
            await asyncio.sleep(_LOOK_S)
            needing = {*self._ends[node]}
            if not await self._answers(node):
                self._end(needing & self._ends[node])

    def _changed(self) -> None:
        for node in self._ends.keys() - self._membership.members.keys():
            self._end(self._ends[node])

    def _end(self, ends: set[asyncio.Timeout]) -> None:
        now = asyncio.get_running_loop().time()
        for end in ends:
            if end.when() is None:  # it was not ended before
                end.reschedule(now)
