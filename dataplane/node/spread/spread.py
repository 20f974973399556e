"""Streams over hosts, put together for one node: what its clients need to reach all homes, what other nodes ask of it,
and what happens when members come and go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any

from dataplane.clock import monotonic
from dataplane.cluster.membership import Membership
from dataplane.errors import PeerUnavailable
from dataplane.node.spread.adopting import Adopting
from dataplane.node.spread.far import Far, FarClient
from dataplane.node.spread.holds import Holds
from dataplane.node.spread.limits import Limits
from dataplane.node.spread.mirrors import Mirrors
from dataplane.node.spread.reach import Reach
from dataplane.node.spread.rehoming import Rehoming
from dataplane.node.spread.sharing import Sharing
from dataplane.node.spread.spreading import Spreading
from dataplane.node.spread.wholes import Wholes
from dataplane.node.streams.asking import Asking
from dataplane.node.streams.homes import Homes
from dataplane.node.streams.streaming import Streaming
from dataplane.node.streams.telling import Telling
from dataplane.node.tables.homes import HomeTables, TableHomes, TableReach
from dataplane.node.tables.tables import Tables
from dataplane.wire import peer_messages as pm
from dataplane.wire.messages import Done, Message
from dataplane.wire.peer import Peers


class Spread:
    """The streams of one node, which others have parts of."""

    def __init__(self, node: bytes, homes: Homes, tables: Tables, peers: Peers, membership: Membership) -> None:
        self._homes = homes
        asking = self._asking = Asking(node, peers, membership)
        homes.elsewhere = asking.stores
        homes.telling = self._telling = Telling(node, asking)
        self._wholes = Wholes(node, homes, asking, membership)
        self._adopting = Adopting(homes, self._wholes, asking)
        self._mirrors = Mirrors(homes, self._wholes, asking, self._adopting)
        self._holds = Holds(homes, self._wholes, self._mirrors, asking)
        homes.keep_elsewhere = self._holds.keep
        self._rehoming = Rehoming(self._wholes, self._mirrors, asking, homes.told, self._adopting.awaited)
        self._wholes.watch(made=self._rehoming.begin)
        self._limits = Limits(self._wholes, asking, self._mirrors.coming)
        self._sharing = Sharing(lambda: self._reach(Streaming(self, homes)), monotonic)
        self._wholes.watch(self._sharing.dropped)
        self._tables = TableHomes(node, tables, homes, asking, membership)
        self._far = Far(self._for, self._asking.knows)
        self._wholes.watch(self._limits.dropped, self._limits.begin)
        self._wholes.watch(self._adopting.forget)
        self._wholes.watch(self._mirrors.dropped)

    def _for(self, client: FarClient) -> Spreading:
        streams = Streaming(client, self._homes)
        return Spreading(self._reach(streams), self._sharing, HomeTables(self._tables, streams))

    def client(self, streams: Streaming) -> Spreading:
        """All streams and tables as one client uses them, given the streams that are here."""
        return Spreading(self._reach(streams), self._sharing, TableReach(self._tables, streams))

    def _reach(self, streams: Streaming) -> Reach:
        return Reach(streams, self._wholes, self._mirrors, self._limits, self._holds)

    def answer(self, request: Any) -> Message | Awaitable[Message] | None:
        """What another node's message is answered; None for what is not about streams or tables. Raises PeerUnavailable
        for what is about what is over."""
        self._wholes.look()
        if not isinstance(request, pm.Fenced):
            return self._answer(request)
        self._asking.check(request)
        answer = self._answer(request)
        return self._begun(request, answer) if isinstance(answer, Coroutine) else answer

    async def _begun(self, request: pm.Fenced, answer: Coroutine[Any, Any, Message]) -> Message:
        """What was not over when it came may be when it begins."""
        try:
            self._asking.check(request)
        except PeerUnavailable:
            answer.close()
            raise
        return await answer

    def _answer(self, request: Any) -> Message | Awaitable[Message] | None:
        match request:
            case pm.Ask():
                return self._far.asked(request)
            case pm.NotAsked():
                self._far.not_asked(request.node, request.number)
            case pm.ClientGone():
                self._far.leave(FarClient(request.node, request.client))
            case pm.OpenPart():
                return self._wholes.opened(request)
            case pm.DropStream():
                self._wholes.dropped(request.name, request.generation)
            case pm.Locate():
                return pm.Located(request.id, self._wholes.locate(request.token))
            case pm.Settled():
                return self._mirrors.settled(request)
            case pm.Announce():
                came = self._adopting.moved(request) if request.moved else self._adopting.rows(request)
                return self._limits.counted(request.name, came)
            case pm.Still():
                self._rehoming.still(request)
            case pm.Moved():
                return self._mirrors.moved(request)
            case pm.Unmoved():
                return self._mirrors.unmoved(request)
            case pm.AnnounceColumns():
                return self._adopting.columns(request)
            case pm.Hold():
                return self._holds.hold(request)
            case pm.HeldAs():
                return self._holds.held_as(request)
            case pm.LetGo():
                self._holds.let_go(request.node, request.number)
            case pm.Holds():
                self._limits.told(request)
            case _:
                return self._tables.answer(request)
        return Done(request.id)

    def begin_anew(self, since: int) -> None:
        """Others took this node for dead: of streams nothing is left here, as if it had just been started, but that
        clients go on with what they had opened. What it stores counts from the shard `since` on."""
        self._asking.begin_anew()
        self._far.begin_anew()
        self._rehoming.begin_anew()
        self._telling.begin_anew()
        self._holds.begin_anew()
        self._mirrors.begin_anew()
        self._adopting.begin_anew()
        self._sharing.begin_anew()
        self._tables.begin_anew()
        self._homes.begin_anew(since)
        self._limits.begin_anew()

    def changed(self, gone: Iterable[bytes]) -> None:
        """Members have come, or these have gone or begun anew."""
        for node in gone:
            self._far.gone(node)
            self._wholes.gone(node)
            self._mirrors.gone(node)
            self._holds.gone(node)
            self._tables.keeping.gone(node)
            asyncio.get_running_loop().call_soon(self._homes.lose, node)  # by then it is known if it has begun anew
        self._wholes.moved()
        self._limits.changed()
        self._rehoming.changed()
        self._tables.changed()

    async def aclose(self) -> None:
        """The node stops."""
        await self._far.aclose()
        await self._tables.aclose()
        await self._sharing.aclose()
        await self._rehoming.aclose()
        await self._holds.aclose()
        await self._mirrors.aclose()
        await self._limits.aclose()
        await self._wholes.aclose()
        await self._telling.aclose()
