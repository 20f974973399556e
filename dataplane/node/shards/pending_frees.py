"""Frees of shards on other nodes, repeated until they are answered.

A node that is suspended or cut off keeps its shards, and frees that are sent meanwhile do not reach it. A caller that
freed a reference with replicas, or acked rows, does not free again.

Invariants: a free is sent again until the node answers, or its data counts as lost. At most `MAX_PENDING` messages to a
node are kept, the newest.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import TypeAlias

from dataplane.background_tasks import BackgroundTasks
from dataplane.cluster.membership import Membership
from dataplane.errors import DataplaneError, PeerUnavailable
from dataplane.wire import peer_messages as pm
from dataplane.wire.messages import Done
from dataplane.wire.peer import Peers

log = logging.getLogger(__name__)

MAX_PENDING = 1 << 14
"""The most messages that are kept for a node."""

_AGAIN_S = 1.0
_CONTROL_S = 4.0  # as in `fetch`

Part: TypeAlias = tuple[int, list[int], tuple[int, int, bytes]]
_Free: TypeAlias = tuple[bytes, list[Part]]  # the owner, and parts of its shards


class PendingFrees:
    """The frees that one node sends to others without waiting."""

    def __init__(self, peers: Peers, membership: Membership) -> None:
        self._peers = peers
        self._membership = membership
        self._pending: dict[bytes, deque[_Free]] = {}
        self._background = BackgroundTasks()

    def send(self, node: bytes, owner: bytes, parts: Sequence[Part]) -> None:
        """Free parts of the owner's shards on `node`: of the replicas there, or of the shards if it is the owner."""
        free = owner, list(parts)
        if node in self._pending:
            self._pending[node].append(free)
        else:
            self._background.spawn(self._send(node, free))

    async def _send(self, node: bytes, free: _Free) -> None:
        if await self._answered(node, free):
            return
        if node in self._pending:  # a task repeats them
            self._pending[node].append(free)
            return
        pending = self._pending[node] = deque([free], MAX_PENDING)
        while pending and self._membership.may_return(node.hex()):
            first = pending[0]
            if not await self._answered(node, first):
                await asyncio.sleep(_AGAIN_S)
            elif pending[0] is first:  # else it was dropped for a newer one
                pending.popleft()
        del self._pending[node]

    async def _answered(self, node: bytes, free: _Free) -> bool:
        member = self._membership.members.get(node)
        if member is None:
            return False
        owner, parts = free
        number = self._peers.next_id()
        try:
            if node == owner:
                await self._peers.request(member, pm.FreeParts(number, parts), pm.PartsFreed, _CONTROL_S)
            else:
                await self._peers.request(member, pm.FreeReplicas(number, owner, parts), Done, _CONTROL_S)
        except PeerUnavailable:
            return False
        except DataplaneError as error:
            log.warning("node %s refused to free parts of shards: %s", node.hex(), error)
        return True

    async def aclose(self) -> None:
        await self._background.aclose()
