"""Changes of shards on other nodes, repeated until they are answered: frees, and links to parts of replicas.

A node that is suspended or cut off keeps its shards, and changes that are sent meanwhile do not reach it. A caller that
freed a reference with replicas, acked rows, or appended them to another stream does not do so again.

Invariants: a change is sent again until the node answers, or its data counts as lost. The changes of a node are sent
one after the other, so it knows a link to a part of a shard before it frees the rest. At most `MAX_PENDING` changes of
a node are kept, the newest.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, TypeAlias

from dataplane.background_tasks import BackgroundTasks
from dataplane.cluster.membership import Membership
from dataplane.errors import DataplaneError, PeerUnavailable
from dataplane.wire import peer_messages as pm
from dataplane.wire.messages import Done
from dataplane.wire.peer import Peers
from dataplane.wire.shard_messages import Selection

log = logging.getLogger(__name__)

MAX_PENDING = 1 << 14
"""The most changes that are kept for a node."""

_TOGETHER = 256  # parts of several frees in one message; the node frees them in one step
_AGAIN_S = 1.0
_CONTROL_S = 4.0  # as in `fetch`

Part: TypeAlias = tuple[int, list[int], tuple[int, int, bytes]]
_Kind: TypeAlias = type[pm.FreeReplicas] | type[pm.RetainReplicas] | None  # None: FreeParts
_Change: TypeAlias = tuple[_Kind, bytes, list[Any]]  # the message, the owner of the shards, and their parts or links


class PendingChanges:
    """The changes that one node sends to others without waiting."""

    def __init__(self, peers: Peers, membership: Membership) -> None:
        self._peers = peers
        self._membership = membership
        self._pending: dict[bytes, deque[_Change]] = {}
        self._background = BackgroundTasks()

    def free(self, node: bytes, owner: bytes, parts: Sequence[Part]) -> None:
        """Free parts of the owner's shards on `node`: of the replicas there, or of the shards if it is the owner."""
        self._send(node, (None if node == owner else pm.FreeReplicas, owner, [*parts]))

    def retain(self, node: bytes, owner: bytes, links: Sequence[tuple[int, Selection]]) -> None:
        """Make links to replicas of the owner's shards on `node`: those that were made to the shards."""
        self._send(node, (pm.RetainReplicas, owner, [*links]))

    def _send(self, node: bytes, change: _Change) -> None:
        if node in self._pending:
            self._pending[node].append(change)
        else:
            self._pending[node] = deque([change], MAX_PENDING)
            self._background.spawn(self._send_all(node))

    async def _send_all(self, node: bytes) -> None:
        pending = self._pending[node]
        while pending and self._membership.may_return(node.hex()):
            some = _first(pending)
            if not await self._answered(node, some):
                await asyncio.sleep(_AGAIN_S)
                continue
            for each in some:
                if pending[0] is each:  # else it was dropped for a newer one
                    pending.popleft()
        del self._pending[node]

    async def _answered(self, node: bytes, some: Sequence[_Change]) -> bool:
        member = self._membership.members.get(node)
        if member is None:
            return False
        (kind, owner, _), number = some[0], self._peers.next_id()
        what = [part for *_, parts in some for part in parts]
        try:
            if kind is None:
                await self._peers.request(member, pm.FreeParts(number, what), pm.PartsFreed, _CONTROL_S)
            else:
                await self._peers.request(member, kind(number, owner, what), Done, _CONTROL_S)
        except PeerUnavailable:
            return False
        except DataplaneError as error:
            log.warning("node %s refused a change of shards: %s", node.hex(), error)
        return True

    async def aclose(self) -> None:
        await self._background.aclose()


def _first(pending: Sequence[_Change]) -> list[_Change]:
    """The first change, with the frees after it that fit into its message."""
    kind, owner, parts = pending[0]
    some, count = [pending[0]], len(parts)
    for each in islice(pending, 1, None):
        count += len(each[2])
        if kind is pm.RetainReplicas or each[:2] != (kind, owner) or count > _TOGETHER:
            break
        some.append(each)
    return some
