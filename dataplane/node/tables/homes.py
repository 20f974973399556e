"""Tables over hosts: each has one home, where it was made, and is asked for there.

It is made at the node with the highest hash of its name, once that has heard from all others that they have none of
its name; then it stays there, whoever comes. Columns stay where they were written (`node.tables.keeping`). There is no
second home: when the home's host dies its tables are lost, and who knew them is told `OwnerDied`, so that nobody takes
a new table of the name for the old.

What always holds: no call waits for a home that is no member any more; a question that is asked again is done once
(`node.spread.far`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable
from functools import partial
from typing import Any

import msgspec

from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.cluster.membership import Membership
from dataplane.cluster.placement import Placement
from dataplane.errors import Closed, OwnerDied, PeerUnavailable
from dataplane.node.streams.asking import Asking
from dataplane.node.streams.homes import Homes
from dataplane.node.streams.streaming import Streaming, Waiting
from dataplane.node.tables.keeping import Keeping
from dataplane.node.tables.tables import TABLES, TableRequest, Tables, Tabling
from dataplane.wire import messages as m
from dataplane.wire import peer_messages as pm

_TRIES = 8  # to find a home while members come and go
_PAUSE_S = 0.1

_far_numbers = itertools.count(1 << 32)  # of clients, as homes know them: streams count from below


class TableHomes:
    """The homes of tables, as one node knows them."""

    def __init__(self, node: bytes, tables: Tables, homes: Homes, asking: Asking, membership: Membership) -> None:
        self.node = node
        self.tables = tables
        self.asking = asking
        self.keeping = Keeping(node, homes, asking)
        tables.thinned = self.keeping.thinned
        self._membership = membership
        self._known: dict[str, bytes] = {}
        self._making: Counter[str] = Counter()
        self._numbers = itertools.count(1)

    @property
    def members(self) -> list[bytes]:
        """The nodes that are there."""
        return list(self._membership.members)

    def next_number(self) -> int:
        """A number for what is to be kept."""
        return next(self._numbers)

    # finding

    def at(self, name: str) -> bytes:
        """The node to ask for the table of this name, as far as is known."""
        if self.tables.find(name) is not None:
            return self.node
        known = self._known.get(name)
        if known is not None and known in self._membership.members:
            return known
        return Placement(self._membership.members).home("table", name)

    async def look_for(self, name: str) -> bool:
        """Ask all others whether they have the table of this name; whether one does. Raises PeerUnavailable."""
        self._known.pop(name, None)
        others = [node for node in self._membership.members if node != self.node]
        asked = [
            self.asking.tell(node, pm.FindTable(self.asking.next_id(), self.node, name), pm.FoundTable)
            for node in others
        ]
        for node, reply in zip(others, await asyncio.gather(*asked), strict=True):
            if reply.there:
                self._known[name] = node
                return True
        return False

    def found(self, request: pm.FindTable) -> pm.FoundTable:
        """Whether the table is here, or about to be."""
        here = self.tables.find(request.name) is not None
        return pm.FoundTable(request.id, here or (request.name in self._making and self.node > request.node))

    async def make_sure(self, name: str) -> None:
        """When this returns, the table of this name is here or nowhere. Raises Closed where it is elsewhere."""
        self._making[name] += 1
        try:
            if await self.look_for(name) and self.tables.find(name) is None:
                raise Closed(f"the table {name!r} is at another home")
        finally:
            self._making[name] -= 1
            if not self._making[name]:
                del self._making[name]

    def died(self, node: bytes) -> bool:
        """Whether this was a node that is no member any more."""
        return bool(node) and node != self.node and node not in self._membership.members

    # among nodes

    def answer(self, request: Any) -> m.Message | Awaitable[m.Message] | None:
        """What another node's message is answered; None for what is not about tables."""
        match request:
            case pm.FindTable():
                return self.found(request)
            case pm.KeepRows():
                self.keeping.keep(request.home, request.node, request.number, BatchRef.decode(request.ref))
            case pm.LetGoRows():
                self.keeping.let_go(request.home, request.node, request.number)
            case pm.ThinRows():
                self.keeping.thin(request)
            case _:
                return None
        return m.Done(request.id)

    def changed(self) -> None:
        """Members have come or gone: who waits for a table that is not here looks where it will be."""
        self.tables.wake()

    def begin_anew(self) -> None:
        """Others took this node for dead: its tables are lost to them, and what it kept for theirs."""
        self._known.clear()
        self.keeping.begin_anew()
        self.tables.drop_all()

    async def aclose(self) -> None:
        """The node stops."""
        await self.keeping.aclose()


class HomeTables:
    """The tables here, as a client of another node uses them: those that are elsewhere are refused, with `Closed`."""

    def __init__(self, homes: TableHomes, streams: Streaming) -> None:
        self._homes = homes
        self._tabling = Tabling(homes.tables, streams, self._check)

    def _check(self, name: str) -> None:
        """Raises Closed where a table that is not here would be made elsewhere."""
        if self._homes.at(name) != self._homes.node:
            raise Closed(f"the table {name!r} is at another home")

    def answer(self, request: TableRequest, deadline: Deadline) -> m.Reply | Waiting:
        """As `Tabling.answer`."""
        if isinstance(request, m.Tables) or self._homes.tables.find(request.table) is not None:
            return self._tabling.answer(request, deadline)
        self._check(request.table)
        return partial(self._made_sure, request, deadline)

    def leave(self) -> None:
        """The client has gone. Nothing here is its own."""

    async def _made_sure(self, request: Any, deadline: Deadline) -> m.Reply:
        await self._homes.make_sure(request.table)
        answer = self._tabling.answer(request, deadline)
        return answer if isinstance(answer, m.Message) else await answer()


class TableReach:
    """All tables, as a client of this node uses them."""

    def __init__(self, homes: TableHomes, streams: Streaming) -> None:
        self._homes = homes
        self._streams = streams
        self._here = HomeTables(homes, streams)
        self._client = next(_far_numbers)
        self._asked: set[bytes] = set()  # nodes

    def answer(self, request: TableRequest, deadline: Deadline) -> m.Reply | Waiting:
        """As `Tabling.answer`."""
        if isinstance(request, m.Tables):
            return partial(self._all, request)
        if self._homes.died(request.home):
            raise _died(request)
        here = self._homes.tables.find(request.table) is not None
        if isinstance(request, m.WriteRows):
            request = msgspec.structs.replace(request, held=[])
            ref = BatchRef.decode(request.ref) if request.ref else None
            if ref is not None and not (here and all(node == self._homes.node for node, _ in ref.shards())):
                return partial(self._write, request, ref, deadline)
        return self._here.answer(request, deadline) if here else partial(self._route, request, deadline)

    def leave(self) -> None:
        """The client has gone."""
        for node in self._asked:
            gone = pm.ClientGone(self._homes.asking.next_id(), self._homes.node, self._client)
            self._homes.asking.tell_soon(node, gone)
        self._asked.clear()

    async def _all(self, request: m.Tables) -> m.Reply:
        """The figures of the first tables of all nodes that answer."""
        found = self._homes.tables.figures(request.after, TABLES)
        others = [node for node in self._homes.members if node != self._homes.node]
        asked = [self._ask(node, m.Tables(0, request.after), m.Figures, 0.0) for node in others]
        for reply in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(reply, m.Figures):
                found |= reply.values
        return m.Figures(request.id, {name: found[name] for name in sorted(found)[:TABLES]})

    # where the home is

    async def _route(self, request: Any, deadline: Deadline) -> m.Reply:
        """What the home answers, found anew where it is not where it was thought to be."""
        for _ in range(_TRIES):
            home = self._homes.at(request.table)
            try:
                return await self._at(home, request, deadline)
            except Closed:
                if not await self._homes.look_for(request.table):
                    await asyncio.sleep(_PAUSE_S)  # not all know the same members yet
        raise PeerUnavailable(f"the home of the table {request.table!r} is not settled yet; try again")

    async def _at(self, home: bytes, request: Any, deadline: Deadline) -> m.Reply:
        if home == self._homes.node:
            answer = self._here.answer(request, deadline)
            return answer if isinstance(answer, m.Message) else await answer()
        waits = isinstance(request, m.ReadyRows)
        asked = msgspec.structs.replace(request, id=0)
        if waits:
            asked = msgspec.structs.replace(asked, timeout_s=deadline.remaining_s)
        try:
            reply = await self._ask(home, asked, m.Message, deadline.remaining_s if waits else 0.0)
        except PeerUnavailable as error:
            if request.home == home and self._homes.died(home):
                raise _died(request) from error
            raise
        answered: m.Reply = msgspec.structs.replace(reply, id=request.id)
        return answered

    async def _ask(self, node: bytes, request: Any, kind: type[Any], wait_s: float) -> Any:
        self._asked.add(node)
        return await self._homes.asking.ask(node, self._client, request, kind, wait_s)

    # writing

    async def _write(self, request: m.WriteRows, ref: BatchRef, deadline: Deadline) -> m.Reply:
        """Have those keep what is written that store it, and tell the home."""
        for _ in range(_TRIES):
            home = self._homes.at(request.table)
            try:
                return await self._write_at(home, request, ref, deadline)
            except Closed:
                if not await self._homes.look_for(request.table):
                    await asyncio.sleep(_PAUSE_S)
        raise PeerUnavailable(f"the home of the table {request.table!r} is not settled yet; try again")

    async def _write_at(self, home: bytes, request: m.WriteRows, ref: BatchRef, deadline: Deadline) -> m.Reply:
        here, number, asked = self._homes.node, self._homes.next_number(), []
        try:
            for node in dict.fromkeys(node for node, _ in ref.shards()):
                if node == home:
                    continue
                asked.append(node)
                await self._keep(node, home, number, ref)
            held = [(node, here, number) for node in asked]
            told = msgspec.structs.replace(request, staged="", held=held)
            reply = await self._at(home, told, deadline)
        except BaseException:
            for node in asked:
                self._let_go(node, home, number)
            raise
        self._streams.kept(request.staged, ref)
        return reply

    async def _keep(self, node: bytes, home: bytes, number: int, ref: BatchRef) -> None:
        here = self._homes.node
        if node == here:
            self._homes.keeping.keep(home, here, number, ref)
        else:
            message = pm.KeepRows(self._homes.asking.next_id(), home, here, number, ref.encode())
            await self._homes.asking.tell(node, message, m.Done)

    def _let_go(self, node: bytes, home: bytes, number: int) -> None:
        here = self._homes.node
        if node == here:
            self._homes.keeping.let_go(home, here, number)
        else:
            message = pm.LetGoRows(self._homes.asking.next_id(), home, here, number)
            self._homes.asking.tell_soon(node, message)


def _died(request: Any) -> OwnerDied:
    return OwnerDied(
        f"the table {request.table!r} was lost with its home, node {request.home.hex()}; write it again, to"
        f" plane.table({request.table!r})",
        node=request.home.hex(),
    )
