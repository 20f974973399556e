"""What is done about placement tables as nodes come and go.

Of the nodes that a table names the first that is a member takes care of it: it closes partitions whose node has gone,
deletes closed ones that are empty, retires sets of open partitions, and says which partitions are lost. Two that take
themselves for the first do no harm. Who leads a partition that no table names deletes it after a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from dataplane.clock import Deadline, monotonic
from dataplane.cluster.membership import Membership
from dataplane.coordinator.base import DELETED, Coordinator, Unavailable
from dataplane.errors import DataplaneError, Lost, OutcomeUnknown, PeerUnavailable
from dataplane.node.partitions import table as tables
from dataplane.node.partitions.background import Background
from dataplane.node.partitions.census import Census, caretakers
from dataplane.node.partitions.hosted import Hosted
from dataplane.node.partitions.records import Records
from dataplane.node.partitions.replicas import Replicas, forget
from dataplane.node.partitions.requests import ASK_S, YES, Requests
from dataplane.node.partitions.router import Router
from dataplane.node.partitions.table import Table, is_durable
from dataplane.replication.configuration import decode

log = logging.getLogger(__name__)

_LOST, _AWAY, _EMPTY = "lost", "away", "empty"
_CARE_S = 2.0  # between looks at the tables that this node takes care of
_FORGOTTEN_S, _NOWHERE_S = 60.0, 5.0
"""For which a coordinator that has forgotten a partition may not be told of it by a replica, before none is left; and
the same where no node has one that ever will."""

Extend = Callable[[Table, str], Awaitable[Table]]
"""Opens a partition of a node."""


class Caretaker:
    """See the module. `run` it until it is cancelled. `fit(durable)`: the members that can have partitions;
    `named(partition)`: whether a table that is known here names it, or will."""

    def __init__(
        self,
        coordinator: Coordinator,
        members: Membership,
        replicas: Replicas,
        router: Router,
        requests: Requests,
        records: Records,
        background: Background,
        kind: str,
        *,
        extend: Extend,
        fit: Callable[[bool], set[str]],
        named: Callable[[str], bool],
    ) -> None:
        self._coordinator = coordinator
        self._members = members
        self._replicas = replicas
        self._router = router
        self._requests = requests
        self._records = records
        self._background = background
        self._kind = kind
        self._extend = extend
        self._fit = fit
        self._named = named
        self._census = Census(members, replicas, records, kind)
        self._remembered = replicas.remembered
        self._unnamed: dict[str, float] = {}  # partitions led here that no table names, since when
        self._forgotten: dict[str, float] = {}  # partitions, and since when the coordinator does not know them
        self.leaving = False

    async def run(self) -> None:
        """Take care of tables until cancelled."""
        while True:
            await asyncio.sleep(_CARE_S)
            self._census.say(self._forgotten)
            await self._add_found()
            for table in self._records:
                try:
                    if self._members.me in caretakers(self._members, table, 1):
                        await self.take_care(table)
                except DataplaneError as error:
                    log.info("the placement of %s is looked after later: %s", table.stream, error)
            try:
                await self._sweep()
            except DataplaneError as error:
                log.info("partitions without a name are looked after later: %s", error)

    async def _sweep(self) -> None:
        """Delete partitions led here that no table has named for as long as it takes to be lost: who made them ended
        before it could name them."""
        now = monotonic()
        unnamed = {hosted.partition for hosted in self._replicas if hosted.replica.serves(now) and self._orphan(hosted)}
        self._unnamed = {key: self._unnamed.get(key, now) for key in unnamed}
        for key, since_s in list(self._unnamed.items()):
            if now - since_s >= self._members.lost_s and not await self._is_named(key):
                log.warning("partition %s, which no table names, is deleted", key)
                self._router.forget(key)
                await self._replicas.delete(key)

    def _orphan(self, hosted: Hosted) -> bool:
        """Whether no table that is known here names a partition, and no member that may name it still."""
        key = hosted.partition
        if tables.kind_of(key) != self._kind or self._named(key):
            return False
        maker = tables.node_of(key)
        return maker == self._members.me or self._members.away(maker)

    async def _is_named(self, key: str) -> bool:
        """Whether the coordinator's table names a partition, or is one that it has forgotten, perhaps."""
        name = tables.name_of(key)
        value = await self._coordinator.read(self._records.key(name))
        if not value:
            return value is None and (self._records.find(name) is not None or is_durable(key))
        table = tables.decode(value)
        return table.named(key) or any(table.key_of(each) == key for each in table.reserved)

    async def _add_found(self) -> None:
        """Add the partitions that are led here and that a record lacks which was told again (`finding`)."""
        for hosted in self._replicas if self._remembered is not None else ():
            table = self._records.find(tables.name_of(hosted.partition))
            if table is None or not hosted.durable or not hosted.replica.leads or table.named(hosted.partition):
                continue
            found = None if self._remembered is None else self._remembered.before(self._records.key(table.stream))
            if found is None or found.generation != table.generation:
                continue
            for each in found.partitions:
                if found.key(each.number) == hosted.partition:
                    try:
                        await self._records.change(table, lambda now, each=each: now.with_again(each))  # type: ignore[misc]
                    except (Unavailable, OutcomeUnknown) as error:
                        log.info("partition %s is added again later: %s", hosted.partition, error)

    async def take_care(self, table: Table) -> Table:
        """What there is to do now about one table. Raises Unavailable, OutcomeUnknown, PeerUnavailable."""
        durable = table.durable
        gone = any(self._members.gone(each.node, durable=durable) for each in table.partitions)
        found = await asyncio.gather(*(self._due(table, partition, gone) for partition in table.partitions))
        for partition, due in zip(table.partitions, found, strict=True):
            number = partition.number
            if due == _LOST:
                log.error("every replica of partition %d of %s has died", number, table.stream)
                lost = self._census.lost(table, partition)
                table = await self._records.change(table, lambda now, lost=lost: now.losing(lost))  # type: ignore[misc]
            elif due == _AWAY and not table.full:
                table = await self.close(table, number)
            elif due == _EMPTY:
                try:
                    table = await self._retire(table, number)
                except (Lost, PeerUnavailable) as error:
                    log.info("partition %d of %s is taken out later: %s", number, table.stream, error)
        for partition in table.reserved:
            if self._members.away(partition.node):
                table = await self._records.change(table, lambda now, each=partition: now.unreserved(each))  # type: ignore[misc]
                if not table.named(table.key_of(partition)):
                    await self._replicas.delete(table.key_of(partition))
        if table.closed:  # one that could not be asked, or was made meanwhile
            await asyncio.gather(*(self._ask_to_close(table, each.number) for each in table.partitions))
        return await self._retire_older(table)

    async def _due(self, table: Table, partition: tables.Partition, gone: bool) -> str:
        """What there is to do about a partition. One that does not answer keeps nothing else from being done. `gone`:
        whether a node of the table's is."""
        key = table.key_of(partition)
        try:
            if gone and await self.lost(key):
                return _LOST
            if partition.open:
                return _AWAY if self._members.away(partition.node) else ""
            return _EMPTY if await self._yes(table, partition.number, self._requests.retiring()) else ""
        except DataplaneError as error:
            log.info("partition %s is looked after later: %s", key, error)
            return ""

    async def _ask_to_close(self, table: Table, number: int) -> None:
        try:
            await self._router.ask(table.key(number), self._requests.closing(), Deadline.after(ASK_S))
        except DataplaneError as error:
            log.info("partition %d of %s is closed later: %s", number, table.stream, error)

    async def _retire_older(self, table: Table) -> Table:
        """Retire all sets of open partitions that nobody needs, or the oldest alone."""
        newest = len(table.older) - 1
        for last in dict.fromkeys((newest, 0)) if table.older else ():
            version = table.older[last][0]
            numbers = {number for _, each in table.older[: last + 1] for number in each}
            outliving = self._requests.outliving(version)
            if all(await asyncio.gather(*(self._yes(table, number, outliving) for number in sorted(numbers)))):
                return await self._records.change(table, lambda now, version=version: now.retired(version))  # type: ignore[misc]
        return table

    async def _retire(self, table: Table, number: int) -> Table:
        """Have a partition no more that is empty, and refuses appends; what it has counted stays."""
        if table.find(number) is None:
            return table
        key, requests = table.key(number), self._requests
        counting = requests.counting()
        answer = await self._router.ask(key, counting, Deadline.after(ASK_S)) if counting else b""
        table = await self._records.change(
            table, lambda now: now.without(number, requests.counted(now.totals, answer) if answer else None)
        )
        await self._replicas.delete(key)
        return table

    async def close(self, table: Table, number: int) -> Table:
        """Close a partition to new groups; another is opened first if it is the last."""
        if table.open == (number,):
            nodes = [node for node in self._fit(table.durable) if node != self._members.me or not self.leaving]
            if not nodes:
                return table
            table = await self._extend(table, nodes[0])
        return await self._records.change(table, lambda now: now if now.open == (number,) else now.draining(number))

    async def _yes(self, table: Table, number: int, request: bytes) -> bool:
        if table.find(number) is None:
            return True
        return await self._router.ask(table.key(number), request, Deadline.after(ASK_S)) == YES

    async def lost(self, partition: str) -> bool:
        """Whether every replica of a partition has died, or a coordinator that has forgotten it is told by nobody.
        Raises Unavailable, OutcomeUnknown, Corrupt."""
        key = self._replicas.key(partition)
        value = await self._coordinator.read(key)
        if value is None:
            for_s = monotonic() - self._forgotten.setdefault(partition, monotonic())
            soon = (
                for_s >= _NOWHERE_S and not is_durable(partition) and await self._replicas.recruiting.nowhere(partition)
            )
            if for_s < _FORGOTTEN_S and not soon:
                return False
            value = await self._coordinator.swap(key, None, DELETED)  # who would tell of it now comes too late
            self._background.spawn(forget(self._coordinator, key))
            return value == DELETED
        self._forgotten.pop(partition, None)
        if value == DELETED:
            return False
        configuration = decode(value)
        durable, replicas = is_durable(partition), (configuration.leader, *configuration.followers)
        return all(self._members.gone(node, durable=durable) for node, _ in replicas)
