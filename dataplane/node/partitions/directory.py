"""The streams (or tables) of a cluster: their placement tables, as this node knows, makes and changes them.

A partition is made before the table names it, so a partition that is named can be asked. Tables change by
compare-and-set alone, and who loses reads again. Of the nodes that a table names the first that is a member takes care
of it: it closes partitions whose node has gone, deletes closed ones that are empty, retires sets of open partitions,
and says which partitions are lost. Two that take themselves for the first do no harm.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Protocol

from dataplane.clock import Deadline
from dataplane.coordinator.base import DELETED, Coordinator, Unavailable
from dataplane.errors import DataplaneError, Misuse, OutcomeUnknown, PeerUnavailable
from dataplane.node.partitions import table as tables
from dataplane.node.partitions.background import Background
from dataplane.node.partitions.members import Members
from dataplane.node.partitions.replicas import Replicas, forget
from dataplane.node.partitions.router import Router
from dataplane.node.partitions.table import Table
from dataplane.replication.configuration import decode

log = logging.getLogger(__name__)

AT_CREATION = 16
"""Nodes that have a partition of a stream from its beginning; others get theirs when they append."""

YES = b"\x01"
_AGAIN_S = 0.5
_CARE_S = 2.0  # between looks at the tables that this node takes care of
_ASK_S = 10.0


class Requests(Protocol):
    """What the directory and the router ask of state machines. None of them needs a sequence: they may be repeated."""

    def opening(self, table: Table, number: int) -> bytes:
        """The first request to a new partition, or b"" for none."""

    def disowning(self, groups: Sequence[str | int]) -> bytes:
        """Of which of these groups or keys the partition holds a part; from now on it refuses the first row of the
        others. Answered by a byte for each, 1 for those that it holds."""

    def outliving(self, version: int) -> bytes:
        """Whether no row is left that came by this version of the table, or an older one: YES or not."""

    def retiring(self) -> bytes:
        """Whether the partition is empty, and from then on refuses all appends: YES or not."""


class Directory:
    """See the module. `run` watches over the tables until it is cancelled."""

    def __init__(
        self,
        coordinator: Coordinator,
        members: Members,
        replicas: Replicas,
        router: Router,
        requests: Requests,
        *,
        prefix: str = "placements/",
    ) -> None:
        self._coordinator = coordinator
        self._members = members
        self._replicas = replicas
        self._router = router
        self._requests = requests
        self._prefix = prefix
        self._me = members.me
        self._tables: dict[str, Table] = {}
        self._watched: set[str] = set()
        self._looked: frozenset[str] = frozenset()  # the nodes that were gone when lost partitions were looked for
        self._leaving = False
        self._background = Background()
        self.changed: Callable[[Table], None] = lambda table: None
        replicas.recruiting.wanted = self._followers
        replicas.hosting = self._hosting

    # Which there are

    def find(self, stream: str) -> Table | None:
        """The table as last seen here."""
        return self._tables.get(stream)

    async def open(self, stream: str, settings: bytes | None, *, followers: int = 1) -> Table:
        """The table of a stream; with settings it is made if there is none. Raises Misuse where there is none, or one
        with other settings; Unavailable, OutcomeUnknown."""
        table = await self.read(stream)
        if table is None:
            if settings is None:
                raise Misuse(f"there is no stream {stream!r}; name its tasks to make it")
            table = await self._create(stream, settings, followers)
        if settings is not None and table.settings != settings:
            raise Misuse(f"stream {stream!r} was made with other settings")
        return table

    async def read(self, stream: str) -> Table | None:
        """The table as it is now, which is watched from here on. Raises Unavailable, Corrupt."""
        value = await self._coordinator.read(self._prefix + stream)
        if value is None and stream in self._tables:
            return await self._restore(stream)
        if not value:
            self._tables.pop(stream, None)
            return None
        self._watch(stream)
        return self._saw(tables.decode(value))

    async def _restore(self, stream: str) -> Table | None:
        """The coordinator has forgotten a stream that is known here."""
        log.warning("the coordinator has forgotten stream %r; this node says what it knows", stream)
        return await self._swap(None, self._tables[stream])

    async def _create(self, stream: str, settings: bytes, followers: int) -> Table:
        others = sorted(self._members.current.keys() - {self._me}, key=lambda node: secrets.token_bytes(8))
        table = Table(0, stream, secrets.token_hex(4), settings, followers)
        table = table.extended([self._me, *others[: AT_CREATION - 1]])
        made = await asyncio.gather(*(self._make(table, each) for each in table.partitions))
        there = tuple(each for each, ok in zip(table.partitions, made, strict=True) if ok)
        table = Table(1, stream, table.generation, settings, followers, there, (), table.next)
        found = await self._swap(None, table)
        if found is None or found.generation != table.generation:  # somebody was first
            await self._delete(table)
        if found is None:
            raise Misuse(f"stream {stream!r} was dropped as it was made")
        self._watch(stream)
        return found

    async def _make(self, table: Table, partition: tables.Partition) -> bool:
        """Make a partition, led by its node. Whether that was done; this node's own has to be."""
        key = table.key(partition.number)
        try:
            await self._replicas.create(key, partition.node)
            opening = self._requests.opening(table, partition.number)
            if opening:
                await self._router.ask(key, opening, Deadline.after(_ASK_S))
        except PeerUnavailable as error:
            if partition.node == self._me:
                raise
            log.info("node %s has no partition of %s yet: %s", partition.node, table.stream, error)
            return False
        return True

    async def own(self, stream: str) -> tuple[Table, int]:
        """The partition of this node's producers, which is made if there is none. Raises as `open`."""
        table = self._tables.get(stream) or await self.open(stream, None)
        while (number := table.own(self._me)) is None:
            if self._leaving:
                return table, min(table.open)
            wider = table.extended([self._me])
            await self._make(wider, wider.partitions[-1])
            found = await self._swap(table, wider)
            if found is None or found.find(wider.next - 1) != wider.partitions[-1]:
                await self._replicas.delete(wider.key(wider.next - 1))
            if found is None or found.generation != table.generation:
                raise Misuse(f"stream {stream!r} was dropped")
            table = found
        return table, number

    async def drop(self, stream: str) -> None:
        """Have a stream no more. Raises Unavailable, OutcomeUnknown."""
        while (table := await self.read(stream)) is not None:
            value = tables.encode(table)
            if await self._coordinator.swap(self._prefix + stream, value, DELETED) == DELETED:
                self._tables.pop(stream, None)
                self._background.spawn(forget(self._coordinator, self._prefix + stream))
                await self._delete(table)

    async def _delete(self, table: Table) -> None:
        for partition in table.partitions:
            self._router.forget(table.key(partition.number))
            await self._replicas.delete(table.key(partition.number))

    async def _swap(self, expected: Table | None, wanted: Table) -> Table | None:
        """Compare-and-set a table; the one that there is afterwards."""
        before = None if expected is None else tables.encode(expected)
        key = self._prefix + wanted.stream
        value = await self._coordinator.swap(key, before, tables.encode(wanted))
        if value == DELETED and expected is None:
            value = await self._coordinator.swap(key, DELETED, tables.encode(wanted))
        return self._saw(tables.decode(value)) if value else None

    def _saw(self, table: Table) -> Table:
        before = self._tables.get(table.stream)
        if before is None or before.generation != table.generation or before.version < table.version:
            self._tables[table.stream] = table
            self.changed(table)
        return self._tables[table.stream]

    # Watching

    def _hosting(self, partition: str) -> None:
        self._watch(partition.rsplit("/", 2)[0])

    def _watch(self, stream: str) -> None:
        if stream not in self._watched:
            self._watched.add(stream)
            self._background.spawn(self._watching(stream))

    async def _watching(self, stream: str) -> None:
        while True:
            try:
                async for value in self._coordinator.watch(self._prefix + stream):
                    if value:
                        self._saw(tables.decode(value))
                    elif value == DELETED:
                        self._tables.pop(stream, None)
                    elif stream in self._tables:
                        await self._restore(stream)
            except (Unavailable, OutcomeUnknown) as error:
                log.debug("the coordinator does not answer for %s: %s", stream, error)
            await asyncio.sleep(_AGAIN_S)

    def _followers(self, partition: str) -> int:
        table = self._tables.get(partition.rsplit("/", 2)[0])
        return 1 if table is None else table.followers

    # Taking care

    async def run(self) -> None:
        """Take care of tables until cancelled."""
        while True:
            await asyncio.sleep(_CARE_S)
            for table in [*self._tables.values()]:
                try:
                    if self._caretaker(table):
                        await self.take_care(table)
                except DataplaneError as error:
                    log.info("the placement of %s is looked after later: %s", table.stream, error)

    def _caretaker(self, table: Table) -> bool:
        named = [each.node for each in table.partitions if not self._members.away(each.node)]
        return self._me == min(named, default=self._me)

    async def take_care(self, table: Table) -> Table:
        """What there is to do now about one table. Raises Unavailable, OutcomeUnknown, PeerUnavailable."""
        gone = frozenset(each.node for each in table.partitions if self._members.gone(each.node))
        for partition in table.partitions:
            if gone and await self._lost(table.key(partition.number)):
                log.error("every replica of partition %d of %s has died", partition.number, table.stream)
                table = await self._change(table, lambda now, number=partition.number: now.losing(number))  # type: ignore[misc]
            elif partition.open and self._members.away(partition.node):
                table = await self._close(table, partition.number)
            elif not partition.open and await self._yes(table, partition.number, self._requests.retiring()):
                key = table.key(partition.number)
                table = await self._change(table, lambda now, number=partition.number: now.without(number))  # type: ignore[misc]
                await self._replicas.delete(key)
        if table.older:
            version, numbers = table.older[0]
            outliving = self._requests.outliving(version)
            if all([await self._yes(table, number, outliving) for number in numbers]):
                table = await self._change(table, lambda now: now.retired(version))
        return table

    async def _close(self, table: Table, number: int) -> Table:
        """Close a partition to new groups; another is opened first if it is the last."""
        if table.open == (number,):
            nodes = [node for node in self._members.current if node != self._me or not self._leaving]
            wider = table.extended([nodes[0]]) if nodes else table
            if wider is table or not await self._make(wider, wider.partitions[-1]):
                return table
            table = await self._swap(table, wider) or table
        return await self._change(table, lambda now: now.closed(number))

    async def _yes(self, table: Table, number: int, request: bytes) -> bool:
        if table.find(number) is None:
            return True
        return await self._router.ask(table.key(number), request, Deadline.after(_ASK_S)) == YES

    async def _lost(self, partition: str) -> bool:
        value = await self._coordinator.read(self._replicas.key(partition))
        if not value:
            return False
        configuration = decode(value)
        return all(self._members.gone(node) for node, _ in (configuration.leader, *configuration.followers))

    async def _change(self, table: Table, make: Callable[[Table], Table]) -> Table:
        """Change a table, from whatever it is by then."""
        while True:
            wanted = make(table)
            found = await self._swap(table, wanted)
            if found is None or found.generation != table.generation or found == wanted:
                return found or table
            table = found

    # Leaving

    async def leave(self, timeout_s: float) -> None:
        """Close this node's partitions to new groups, and hand their lead over. What could not be done in time others
        do when this node has gone."""
        self._leaving = True
        try:
            async with asyncio.timeout(timeout_s / 2):
                for table in [*self._tables.values()]:
                    number = table.own(self._me)
                    if number is not None and len(self._members.current) > 1:
                        await self._close(table, number)
        except (TimeoutError, Unavailable, OutcomeUnknown, PeerUnavailable) as error:
            log.warning("the placement could not be changed as this node leaves: %s", error)
        left = await self._replicas.hand_over(timeout_s / 2)
        if left:
            log.warning("%d partitions have no follower to lead them", len(left))

    async def aclose(self) -> None:
        """Watch no more. Idempotent."""
        await self._background.aclose()
