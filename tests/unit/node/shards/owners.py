"""A node that describes small shards, by real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from dataplane.cluster.membership import Member
from dataplane.errors import Freed
from dataplane.wire import peer_messages as pm
from dataplane.wire.messages import Done, Message
from dataplane.wire.peer import Peers
from tests.keys import KEY
from tests.unit.node.shards.members import ME, Members
from tests.unit.store.stores import content, layout

ANY, OWNER = "tcp://127.0.0.1:0", b"owner..."
NBYTES = 64
Answer = Callable[[Any], Awaitable[Message]]


class Owner:
    """Has every shard but the `freed` ones. It answers while `go` is set; `asked`: the shards asked for."""

    def __init__(self, answer: Answer | None = None) -> None:
        self.peers = Peers(OWNER.hex(), ANY, KEY, answer or self._answer)
        self.freed: set[int] = set()
        self.asked: list[int] = []
        self.go = asyncio.Event()
        self.go.set()

    async def _answer(self, request: Any) -> Message:
        if isinstance(request, pm.FreeParts):
            self.freed |= {number for number, *_ in request.parts}
            return pm.PartsFreed(request.id, [])
        if not isinstance(request, pm.DescribeShards):
            return Done(request.id)
        self.asked += request.shards
        await self.go.wait()
        for number in request.shards:
            if number in self.freed:
                raise Freed(f"shard {number} was freed", shard=number)
        encoded = layout(NBYTES)
        return pm.Described(request.id, [(NBYTES, 1, 1, encoded, [], content(n, NBYTES)) for n in request.shards])


@asynccontextmanager
async def owning(answer: Answer | None = None) -> AsyncIterator[tuple[Owner, Peers, Members]]:
    """An owner, which may answer otherwise; the sockets of another node; and its members, the owner among them."""
    owner, mine = Owner(answer), Peers(ME.hex(), ANY, KEY, lambda request: Done(request.id))
    owner.peers.start()
    mine.start()
    try:
        yield owner, mine, Members(of={OWNER: Member(1, owner.peers.address)})
    finally:
        await mine.aclose()
        await owner.peers.aclose()
