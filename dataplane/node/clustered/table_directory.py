"""Which tables there are, and where: a table is one partition with a follower, and the coordinator has a record of it.

The partition is made at the node of the highest hash of the table's name, with a follower from its first command on,
and stays however its replicas move. A record is a placement table: with one partition, or with none for a while after
that went. Then it keeps what a new partition of the name needs: the number of the next row, so that no number ever
means another row, and the tokens of partitions that were lost, so that who knew one of them is told.

What always holds: a table has one partition; it goes once there is no table in it, and nobody has to be told anything,
for `IDLE_S`, or when every replica has died.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Sequence

import msgspec

from dataplane.clock import Deadline, monotonic
from dataplane.cluster.membership import Membership
from dataplane.cluster.placement import Placement
from dataplane.coordinator.base import DELETED, Coordinator
from dataplane.errors import Corrupt, DataplaneError, LimitExceeded, Lost, Misuse
from dataplane.node.clustered.streams import token_of
from dataplane.node.partitions import table as tables
from dataplane.node.partitions.directory import Directory
from dataplane.node.partitions.hosted import Hosted
from dataplane.node.partitions.replicas import Replicas, forget
from dataplane.node.partitions.router import Router
from dataplane.node.partitions.table import Table
from dataplane.table import requests as r
from dataplane.table.machine import TableMachine

log = logging.getLogger(__name__)

MAX_TABLES = 4096
IDLE_S = 60.0
"""For which a partition without a table stays."""
REMEMBER_S = 3600.0
"""For which the number of the next row of a table that went is remembered."""

_LOST = 16  # tokens of lost partitions that a record keeps
_CARE_S = 2.0
_ASK_S = 5.0
_CHANGES = 48  # bits of the number that changes go on from


class Past(msgspec.Struct, frozen=True, array_like=True):
    """What a record keeps of earlier partitions: the number of the next row, and the tokens of those that were lost."""

    next: int = 0
    lost: tuple[bytes, ...] = ()


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Past)


def past(table: Table | None) -> Past:
    """What a record says of earlier partitions. Raises Corrupt."""
    try:
        return Past() if table is None else _decoder.decode(table.settings)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the coordinator's record of a table is none: {error}") from None


def key_of(table: Table | None) -> str | None:
    """The key of the partition, if there is one."""
    return table.key(table.partitions[0].number) if table is not None and table.partitions else None


def machine(partition: str) -> TableMachine:
    """The state machine of the partition of this key."""
    return TableMachine(tables.name_of(partition))


class TableRequests:
    """`requests.Requests`, of tables: they have one partition, so no row is ever to be looked for in another."""

    def opening(self, table: Table, number: int) -> bytes:
        return r.encode_request(r.Open(first=past(table).next, changes=secrets.randbits(_CHANGES)))

    def disowning(self, groups: Sequence[str | int], version: int) -> bytes:
        raise Misuse("a table has one partition")

    def outliving(self, version: int) -> bytes:
        raise Misuse("a table has one partition")

    def closing(self) -> bytes:
        raise Misuse("a table is not closed")

    def retiring(self) -> bytes:
        return r.encode_request(r.Retire())

    def counting(self) -> bytes:
        return b""

    def counted(self, totals: bytes, answer: bytes) -> bytes:
        return totals


class TableDirectory(Directory):
    """See the module. `run` takes care of records until it is cancelled."""

    def __init__(
        self,
        coordinator: Coordinator,
        members: Membership,
        replicas: Replicas,
        router: Router,
        *,
        idle_s: float = IDLE_S,
        care_s: float = _CARE_S,
    ) -> None:
        super().__init__(coordinator, members, replicas, router, TableRequests(), prefix="tables/", kind=tables.TABLES)
        self._idle_s = idle_s
        self._care_s = care_s
        self._idle: dict[str, float] = {}  # partitions without a table, since when
        self._over: dict[str, tuple[int, float]] = {}  # records without a partition: version, since when
        self._nodes: set[str] = set()  # that were ever members
        members.watch(self._came)
        self._came()

    def _came(self) -> None:
        self._nodes |= self._members.current.keys()

    # Making

    async def record(self, name: str) -> Table | None:
        """The record of a table: one with a partition as last seen here, else as it is now. Raises Unavailable,
        Corrupt."""
        table = self.find(name)
        return table if table is not None and table.partitions else await self.read(name)

    async def made(self, name: str, *, durable: bool = False) -> Table:
        """The record of a table, whose partition is made if there is none, to be durable or not. Raises LimitExceeded,
        Unavailable, OutcomeUnknown, PeerUnavailable; Misuse where this node keeps nothing, or the table is there and is
        not durable."""
        table = await self.record(name)
        if durable and table is not None and table.partitions and not table.durable:
            table = await self._emptied(table)
        while table is None or not table.partitions:
            if sum(bool(each.partitions) for each in self.records) >= MAX_TABLES:
                what = "tables"
                raise LimitExceeded(
                    f"{MAX_TABLES} {what} are there; drop some", what=what, asked=MAX_TABLES + 1, limit=MAX_TABLES
                )
            try:
                table = await self._anew(name, table, durable=durable)
            except Lost:  # it was taken for idle before it had a name
                table = await self.read(name)
        return table

    async def _emptied(self, table: Table) -> Table | None:
        """The record without its partition, which is not durable, if there is no table in it. Raises Misuse where there
        is one."""
        if not await self.retire(table.key(table.partitions[0].number)):
            raise Misuse(f"the table {table.stream!r} was made not to be durable: drop it first, or open it so")
        return await self.read(table.stream)

    async def _anew(self, name: str, before: Table | None, *, durable: bool) -> Table | None:
        """Make a partition where there is none; the record that there is then."""
        version = 0 if before is None else before.version
        self._check_fit(f"table {name!r}", durable=durable)
        record = Table(version, name, self._generation(), _encode(past(before)), followers=1, durable=durable)
        for node in dict.fromkeys((self._first(name, durable=durable), self._me)):
            table = record.extended([node])
            if await self._make(table, table.partitions[0], table.followers):
                break
        found = await self.records.swap(before, table)
        if found is None or found.generation != table.generation:  # somebody was first
            await self._delete(table)
        else:
            self.records.watch(name)
        return found

    def _first(self, name: str, *, durable: bool) -> str:
        """The node that is to lead the table's partition at first."""
        there = [node.encode() for node in self._fit(durable)]
        return Placement(there or [self._me.encode()]).winner("table", name).decode()

    async def read_all(self, keys: Iterable[str]) -> None:
        """Have all records among these keys of the coordinator, to take care of them. Raises Unavailable, Corrupt."""
        for key in keys:
            if key.startswith(self.records.prefix):
                await self.read(key.removeprefix(self.records.prefix))

    # Going

    async def lost(self, name: str, key: str) -> bool:
        """The partition of this key is not found: see whether every replica has died, and say so. Raises Unavailable,
        OutcomeUnknown, Corrupt."""
        table = await self.read(name)
        if table is not None and key_of(table) == key and await self._caretaker.lost(key):
            log.error("every replica of table %r has died", name)
            lost = (*past(table).lost, token_of(key))[-_LOST:]
            table = await self._without(table, Past(0, lost))
        return table is not None and token_of(key) in past(table).lost

    async def _without(self, table: Table, kept: Past) -> Table | None:
        """The record without its partition; as it is where it has changed meanwhile."""
        wanted = msgspec.structs.replace(table, version=table.version + 1, settings=_encode(kept), partitions=())
        return await self.records.swap(table, wanted)

    async def retire(self, key: str) -> bool:
        """End a partition that has no table, unless it is in use again; whether that was done. Raises as `Router.ask`;
        Unavailable, OutcomeUnknown."""
        name = tables.name_of(key)
        answer = r.decode_result(await self._router.ask(key, self._requests.retiring(), Deadline.after(_ASK_S)))
        if not isinstance(answer, r.Retired) or not answer.gone:
            return False
        table = await self.read(name)
        if table is not None and key_of(table) == key:
            await self._without(table, Past(answer.next, past(table).lost))
        self._router.forget(key)
        await self._replicas.delete(key)
        return True

    async def names(self, key: str) -> bool | None:
        """Whether a record names this partition, by what the coordinator has now; None where it has no record, as when
        it was wiped. Raises Unavailable, Corrupt."""
        value = await self._coordinator.read(self.records.key(tables.name_of(key)))
        if value is None:
            return None
        return value != DELETED and key_of(tables.decode(value)) == key

    # Taking care

    async def run(self) -> None:
        """Take care of records until cancelled."""
        looked: frozenset[tuple[str, bool]] = frozenset()
        while True:
            await asyncio.sleep(self._care_s)
            gone = frozenset(
                (node, durable)
                for node in self._nodes
                for durable in (False, True)
                if self._members.gone(node, durable=durable)
            )
            for work in (self._end_idle(), self._forget_old(), self._look_for_lost() if gone - looked else None):
                try:
                    if work is not None:
                        await work
                except DataplaneError as error:
                    log.info("records of tables are looked after later: %s", error)
                    gone = looked
            looked = gone

    async def _end_idle(self) -> None:
        """End partitions that are led here and have had no table for a while."""
        now = monotonic()
        idle = [hosted.partition for hosted in self._replicas if _is_idle(hosted, now)]
        self._idle = {key: self._idle.get(key, now) for key in idle}
        for key in idle:
            hosted = self._replicas.find(key)
            machine = None if hosted is None else hosted.machine
            over = isinstance(machine, TableMachine) and machine.retired  # and not taken away
            if over or now - self._idle[key] >= self._idle_s:
                await self.retire(key)

    async def _forget_old(self) -> None:
        """Take records away that have had no partition for long."""
        now = monotonic()
        over = {table.stream: table for table in self.records if not table.partitions}
        known, self._over = self._over, {}
        for name, table in over.items():
            version, since = known.get(name, (table.version, now))
            self._over[name] = (table.version, since if version == table.version else now)
            if now - self._over[name][1] >= REMEMBER_S:
                key = self.records.key(name)
                if await self._coordinator.swap(key, tables.encode(table), DELETED) == DELETED:
                    self._background.spawn(forget(self._coordinator, key))

    async def _look_for_lost(self) -> None:
        """A node has gone: say which tables are lost with it."""
        for table in self.records:
            key = key_of(table)
            if key is not None and self._replicas.find(key) is None:
                await self.lost(table.stream, key)

    async def leave(self, timeout_s: float) -> None:
        """Nothing: the lead of tables is handed over with that of all partitions (`Directory.leave`)."""


def _is_idle(hosted: Hosted, now: float) -> bool:
    machine = hosted.machine
    return isinstance(machine, TableMachine) and machine.idle and not len(hosted.waiters) and hosted.replica.serves(now)
