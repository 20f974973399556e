"""The streams (or tables) of a cluster: made, opened, extended by partitions, closed and dropped, from one node.

A partition's number is reserved first, then it is made, then the table names it: so a partition that is named can be
asked. How tables change: `records`; who takes care of them: `caretaker`; where groups belong: `group_places`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Mapping, Sequence

import msgspec

from dataplane.batch.field import Field
from dataplane.clock import Deadline
from dataplane.cluster.membership import Membership
from dataplane.coordinator.base import DELETED, Coordinator
from dataplane.errors import DataplaneError, Misuse, PeerUnavailable
from dataplane.node.partitions import table as tables
from dataplane.node.partitions.background import Background
from dataplane.node.partitions.caretaker import Caretaker
from dataplane.node.partitions.group_places import GroupPlaces, Placed
from dataplane.node.partitions.records import LONG_S, SHORT_S, Records
from dataplane.node.partitions.replicas import Replicas, forget
from dataplane.node.partitions.requests import ASK_S, Requests
from dataplane.node.partitions.router import Router
from dataplane.node.partitions.table import LostPartition, Table

log = logging.getLogger(__name__)

AT_CREATION = 16
"""Nodes that have a partition of a stream from its beginning; others get theirs when they append."""


class Directory:
    """See the module. `run` watches over the tables until it is cancelled."""

    def __init__(
        self,
        coordinator: Coordinator,
        members: Membership,
        replicas: Replicas,
        router: Router,
        requests: Requests,
        *,
        prefix: str = "placements/",
        kind: str = tables.STREAMS,
    ) -> None:
        """`kind`: that of its partitions; there is one directory of each on a node."""
        self._kind = kind
        self._coordinator = coordinator
        self._members = members
        self._replicas = replicas
        self._router = router
        self._requests = requests
        self._me = members.me
        self._untold: dict[tuple[str, str], tuple[LostPartition, ...]] = {}
        """By stream and generation: partitions that were lost, and taken by who does not know it."""
        self._prepared: set[str] = set()  # partitions that get a name later
        self._background = Background()
        self.records = Records(coordinator, replicas.remembered, self._background, router.forget, prefix)
        self._places = GroupPlaces(router, requests)
        self.records.settled = self._places.settled
        self._caretaker = Caretaker(
            coordinator,
            members,
            replicas,
            router,
            requests,
            self.records,
            self._background,
            kind,
            extend=lambda table, node: self._extend(table, node),
            fit=lambda durable: self._fit(durable),
            named=lambda partition: partition in self._prepared or self._names(partition),
        )
        self._wanted, replicas.recruiting.wanted = replicas.recruiting.wanted, self._followers  # what others do
        self._hosts, replicas.hosting = replicas.hosting, self._hosting
        self._named, router.named = router.named, self._names

    # Which there are

    def find(self, stream: str) -> Table | None:
        """The table as last seen here."""
        return self.records.find(stream)

    async def read(self, stream: str) -> Table | None:
        """The table as it is now, which is watched from here on. Raises Unavailable, Corrupt."""
        return await self.records.read(stream)

    def forget(self, stream: str, generation: str) -> None:
        """Another node has dropped the stream of this generation."""
        self.records.forget(stream, generation)

    async def place(self, table: Table, groups: Sequence[str | int]) -> list[Placed]:
        """The partitions of these groups or keys: see `GroupPlaces.place`."""
        return await self._places.place(table, groups)

    async def take_care(self, table: Table) -> Table:
        """What there is to do now about one table. Raises Unavailable, OutcomeUnknown, PeerUnavailable."""
        return await self._caretaker.take_care(table)

    async def run(self) -> None:
        """Take care of tables until cancelled."""
        await self._caretaker.run()

    async def open(self, stream: str, settings: bytes | None, *, followers: int = 1, durable: bool = False) -> Table:
        """The table of a stream; with settings it is made if there is none. Raises Misuse where there is none, or one
        with other settings, or where it is to be durable and this node keeps nothing; Unavailable, OutcomeUnknown."""
        table = await self.read(stream)
        if table is None:
            if settings is None:
                raise Misuse(f"there is no stream {stream!r}; name its tasks to make it")
            table = await self._create(stream, settings, followers, durable=durable)
        if settings is not None and table.durable != durable:
            raise Misuse(f"stream {stream!r} was made {'' if table.durable else 'not to be '}durable; open it so")
        if settings is not None and table.settings != settings:
            raise Misuse(f"stream {stream!r} was made with other settings")
        return table

    async def _create(self, stream: str, settings: bytes, followers: int, *, durable: bool) -> Table:
        self._check_fit(f"stream {stream!r}", durable=durable)
        others = sorted(self._fit(durable) - {self._me}, key=lambda node: secrets.token_bytes(8))
        table = Table(0, stream, self._generation(), settings, followers, durable=durable)
        table = table.extended([self._me, *others[: AT_CREATION - 1]])
        made = await asyncio.gather(*(self._make(table, each, followers) for each in table.partitions))
        there = tuple(each for each, ok in zip(table.partitions, made, strict=True) if ok)
        table = msgspec.structs.replace(table, version=1, partitions=there, older=(), first=table.next)
        found = await self.records.swap(None, table)
        if found is None or found.generation != table.generation:  # somebody was first
            await self._delete(table)
        if found is None:
            raise Misuse(f"stream {stream!r} was dropped as it was made")
        self.records.watch(stream)
        return found

    def _generation(self) -> str:
        return self._kind + secrets.token_hex(4)

    def _check_fit(self, what: str, *, durable: bool) -> None:
        if self._me not in self._fit(durable):
            raise Misuse(f"the {what} can't be durable here: start the node with --data-dir DIR")

    def _fit(self, durable: bool) -> set[str]:
        """The members that can have partitions."""
        return {node for node in self._members.current if not durable or self._members.keeps(node)}

    async def prepare(self, stream: str, settings: bytes, *, followers: int = 1, durable: bool = False) -> Table:
        """The table of a stream, with one partition, of this node, which nobody else knows before it is published.
        Raises Misuse where there is a stream of this name; Unavailable, OutcomeUnknown, PeerUnavailable."""
        await self._check_free(stream)
        self._check_fit(f"stream {stream!r}", durable=durable)
        table = Table(0, stream, self._generation(), settings, followers, first=1, durable=durable).extended([self._me])
        self._prepared.add(table.key(0))
        try:
            await self._make(table, table.partitions[0], table.followers)
        except BaseException:
            self._prepared.discard(table.key(0))
            raise
        return table

    async def _check_free(self, stream: str) -> None:
        if await self.read(stream) is not None:
            raise Misuse(f"there is a stream {stream!r} already")

    async def publish(self, table: Table) -> None:
        """Have a prepared stream. Raises Misuse where there is another of its name by now, Unavailable,
        OutcomeUnknown: it may be repeated."""
        found = await self.records.swap(None, table)
        if found is None or found.generation != table.generation:
            raise Misuse(f"there is a stream {table.stream!r} already")
        self._prepared.discard(table.key(0))
        self.records.watch(table.stream)

    async def discard(self, table: Table) -> None:
        """Have a prepared stream no more. Raises Unavailable, OutcomeUnknown."""
        self._prepared.discard(table.key(0))
        await self._delete(table)

    async def _make(self, table: Table, partition: tables.Partition, followers: int) -> bool:
        """Make a partition, led by its node, with so many followers from the beginning. Whether that was done; this
        node's own has to be."""
        key = table.key_of(partition)
        try:
            await self._replicas.create(key, partition.node, followers)
            opening = self._requests.opening(table, partition.number)
            if opening:
                await self._router.ask(key, opening, Deadline.after(ASK_S))
        except PeerUnavailable as error:
            if partition.node == self._me:
                raise
            log.info("node %s has no partition of %s yet: %s", partition.node, table.stream, error)
            return False
        return True

    async def own(self, stream: str) -> tuple[Table, int]:
        """The partition of this node's producers, which is made if there is none; another, where none can be had now.
        Raises as `open`."""
        table = self.records.find(stream) or await self.open(stream, None)
        if table.own(self._me) is None and not self._caretaker.leaving and self._me in self._fit(table.durable):
            table = await self._extend(table, self._me)
        number = table.own(self._me)
        if number is None:
            number = min(table.open) if self._caretaker.leaving else int(table.place([self._me])[0])
        return table, number

    async def _extend(self, table: Table, node: str) -> Table:
        """With an open partition of this node: its number is reserved, then it is made, then named. As it is where the
        table is full, or the node does not answer. Raises Misuse once the stream was dropped."""
        made, pause_s = "", SHORT_S
        while table.own(node) is None and not table.full:
            partition = table.reserved_for(node)
            if partition is not None and table.key_of(partition) != made:
                if not await self._make(table, partition, table.followers):
                    return table
                made = table.key_of(partition)
            wanted = table.reserving(node) if partition is None else table.opening(partition)
            found = await self.records.swap(table, wanted)
            if found is None or found.generation != table.generation:
                await self._unmake(made)
                raise Misuse(f"stream {table.stream!r} was dropped")
            if found != wanted:  # others are at it too
                await asyncio.sleep(pause_s * random.uniform(0.0, 1.0))
                pause_s = min(2 * pause_s, LONG_S)
                found = self.records.latest(found)
            table = found
        if not made or table.own(node) is None:  # the next who asks goes on
            return table
        if not table.named(made):
            await self._unmake(made)
        elif table.closed:
            await self._router.ask(made, self._requests.closing(), Deadline.after(ASK_S))
        return table

    async def _unmake(self, key: str) -> None:
        """A partition that was made is not needed."""
        if key:
            await self._replicas.delete(key)

    async def close(self, stream: str) -> None:
        """Nothing is appended to a stream any more. Raises as `open`, and what partitions refuse with."""
        table = await self.records.change(await self.open(stream, None), Table.shut)
        closing, deadline = self._requests.closing(), Deadline.after(ASK_S)
        await asyncio.gather(*(self._router.ask(table.key(n.number), closing, deadline) for n in table.partitions))

    async def learn(self, table: Table, fields: Mapping[str, Field]) -> None:
        """Have these columns in a stream's table. Raises SchemaMismatch for one that can not be the column of its name,
        Unavailable, OutcomeUnknown."""
        await self.records.change(table, lambda now: now.learning(fields))

    async def drop(self, stream: str, generation: str = "") -> None:
        """Have a stream no more, or that of this generation. Raises Unavailable, OutcomeUnknown."""
        while (table := await self.read(stream)) is not None and generation in ("", table.generation):
            generation = table.generation
            value = tables.encode(table)
            if await self._coordinator.swap(self.records.key(stream), value, DELETED) == DELETED:
                self.records.gone(stream, table)
                self._background.spawn(forget(self._coordinator, self.records.key(stream)))
                await self._delete(table)

    async def _delete(self, table: Table) -> None:
        for key in map(table.key_of, (*table.partitions, *table.reserved)):
            self._router.forget(key)
            await self._replicas.delete(key)

    async def take_lost(self, stream: str) -> tuple[LostPartition, ...]:
        """The partitions of a stream of which every replica has died; each is told once, or again where it was not
        known whether it was told. Raises as `open`."""
        table = await self.open(stream, None)
        key = stream, table.generation
        untold = self._untold.pop(key, ())
        while table.lost:
            lost = tuple(dict.fromkeys((*untold, *table.lost)))
            wanted = table.told(table.lost, secrets.token_hex(8))
            try:
                found = await self.records.swap(table, wanted)
            except BaseException:
                self._untold[key] = lost
                raise
            if found is None or found == wanted:
                return lost
            table = found
        return untold

    def _hosting(self, partition: str) -> None:
        if tables.kind_of(partition) == self._kind:
            self.records.watch(tables.name_of(partition))
        else:
            self._hosts(partition)

    def _names(self, partition: str) -> bool:
        if tables.kind_of(partition) != self._kind:
            return self._named(partition)
        table = self.records.find(tables.name_of(partition))
        return table is not None and table.named(partition)

    def _followers(self, partition: str) -> int:
        if tables.kind_of(partition) != self._kind:
            return self._wanted(partition)
        table = self.records.find(tables.name_of(partition))
        return 1 if table is None else table.followers

    async def leave(self, timeout_s: float) -> None:
        """Close this node's partitions to new groups, and hand their lead over. What could not be done in time others
        do when this node has gone."""
        self._caretaker.leaving = True
        try:
            async with asyncio.timeout(timeout_s / 2):
                for table in self.records:
                    number = table.own(self._me)
                    if number is not None and len(self._members.current) > 1:
                        await self._caretaker.close(table, number)
        except (TimeoutError, DataplaneError) as error:
            log.warning("the placement could not be changed as this node leaves: %s", error)
        left = await self._replicas.hand_over(timeout_s / 2)
        if left:
            log.warning("%d partitions have no follower to lead them", len(left))

    async def aclose(self) -> None:
        """Watch no more. Idempotent."""
        await self._background.aclose()
