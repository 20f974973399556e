"""The tables of the cluster and their partitions. A table has one partition, with a follower, and a record at the
coordinator.

A record without a partition is kept for `REMEMBER_S`. It has the number of the next row, so that a later partition of
the same name reuses no row number. It also has the tokens of lost partitions, so that clients of these get an error.

Invariant: a table has one partition. The partition ends when its table has been dropped and its outbox empty for
`IDLE_S`, or when every replica has died.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence

import msgspec

from dataplane.clock import Deadline, monotonic
from dataplane.cluster.membership import Membership
from dataplane.coordinator.base import Coordinator
from dataplane.errors import Corrupt, Lost, Misuse
from dataplane.node.clustered.open_streams import token_of
from dataplane.node.partitions import record as records
from dataplane.node.partitions.directory import CARE_S, Directory
from dataplane.node.partitions.hosted import HostedReplica
from dataplane.node.partitions.record import Record, name_of
from dataplane.node.partitions.replicas import Replicas
from dataplane.node.partitions.router import Router
from dataplane.table import requests as r
from dataplane.table.machine import TableMachine

log = logging.getLogger(__name__)

IDLE_S = 60.0
"""How long a partition is kept after its table was dropped."""
REMEMBER_S = 3600.0
"""How long the number of the next row of a dropped table is remembered."""

_LOST = 16  # the most tokens of lost partitions in a record
_ASK_S = 5.0
_CHANGES = 48  # bits of the random number from which a partition counts its changes


class PastPartitions(msgspec.Struct, frozen=True, array_like=True):
    """The earlier partitions of a record: the number of the next row, and the tokens of lost partitions."""

    next: int = 0
    lost: tuple[bytes, ...] = ()


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(PastPartitions)


def past(record: Record | None) -> PastPartitions:
    """The earlier partitions of a record. Raises Corrupt."""
    try:
        return PastPartitions() if record is None else _decoder.decode(record.settings)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the coordinator's record of a table is none: {error}") from None


def opening(record: Record) -> bytes:
    """The first request to the partition of a table."""
    return r.encode_request(r.OpenTable(first=past(record).next, changes=secrets.randbits(_CHANGES)))


class TableDirectory(Directory):
    """The directory of the tables; see the module."""

    def __init__(
        self,
        coordinator: Coordinator,
        members: Membership,
        replicas: Replicas,
        router: Router,
        *,
        idle_s: float = IDLE_S,
        care_s: float = CARE_S,
    ) -> None:
        options = {"prefix": "tables/", "kind": records.TABLES}
        super().__init__(coordinator, members, replicas, router, opening, **options, care_s=care_s)
        self._idle_s = idle_s
        self._idle: dict[str, float] = {}  # partitions without a table -> since this time
        self._over: dict[str, tuple[int, float]] = {}  # records without a partition -> version, time of first sight

    # Creating

    async def record(self, name: str) -> Record | None:
        """The record of a table: the copy on this node if it names a partition, else the one at the coordinator. Raises
        Unavailable, Corrupt."""
        record = self.records.find(name)
        return record if record is not None and record.key is not None else await self.records.read(name)

    async def made(self, name: str, *, durable: bool = False) -> Record:
        """Return the record of a table with a partition; create either if there is none. Raises LimitExceeded,
        Unavailable, OutcomeUnknown, PeerUnavailable. If the table is to be durable, raises Misuse if this node has no
        data directory, or if the table exists and is not durable."""
        record = await self.record(name)
        if durable and record is not None and record.key is not None and not record.durable:
            record = await self._emptied(record)
        while record is None or record.key is None:
            wanted = self._new(name, _encode(past(record)), 1, durable=durable)
            if record is not None:
                wanted = msgspec.structs.replace(record, durable=durable)
            try:
                record = await self.placed(wanted, record)
            except Lost:  # the partition was ended as idle before the record named it
                record = await self.records.read(name)
        return record

    async def _emptied(self, record: Record) -> Record | None:
        """The record after its partition, which is not durable, was ended. Raises Misuse if the partition has a
        table."""
        if not await self.retire(record.key or ""):
            raise Misuse(f"the table {record.name!r} was made not to be durable: drop it first, or open it so")
        return await self.records.read(record.name)

    # Ending

    async def is_lost(self, name: str, key: str) -> bool:
        """Whether every replica of a partition that was not found has died. If so, mark the partition as lost in the
        record. Raises Unavailable, OutcomeUnknown, Corrupt."""
        await self.lost(name, key)
        return token_of(key) in past(self.records.find(name)).lost

    def losing(self, record: Record, rows: Sequence[tuple[str, int]]) -> Record:
        lost = (*past(record).lost, token_of(record.key or ""))[-_LOST:]
        return record.without(_encode(PastPartitions(0, lost)))

    async def retire(self, key: str) -> bool:
        """End a partition that has no table, unless it is in use again. Returns whether the partition ended. Raises as
        `Router.ask`; Unavailable."""
        name = name_of(key)
        answer = r.decode_result(await self._router.ask(key, r.encode_request(r.Retire()), Deadline.after(_ASK_S)))
        if not isinstance(answer, r.Retired) or not answer.gone:
            return False
        record = await self.records.read(name)
        if record is not None and record.key == key:
            await self.records.swap(record, record.without(_encode(PastPartitions(answer.next, past(record).lost))))
        self._router.forget(key)
        await self._replicas.delete(key)
        return True

    # Periodic checks

    async def care(self) -> None:
        await super().care()
        await self._end_idle()
        await self._forget_old()

    async def _end_idle(self) -> None:
        """End partitions led here that have had no table for a while."""
        now = monotonic()
        idle = [hosted.partition for hosted in self._replicas if _is_idle(hosted, now)]
        self._idle = {key: self._idle.get(key, now) for key in idle}
        for key in idle:
            hosted = self._replicas.find(key)
            machine = None if hosted is None else hosted.machine
            over = isinstance(machine, TableMachine) and machine.retired  # ended, but its record was not changed
            if over or now - self._idle[key] >= self._idle_s:
                await self.retire(key)

    async def _forget_old(self) -> None:
        """Delete records that have had no partition for `REMEMBER_S`."""
        now = monotonic()
        over = {record.name: record for record in self.records if record.key is None}
        known, self._over = self._over, {}
        for name, record in over.items():
            version, since = known.get(name, (record.version, now))
            self._over[name] = (record.version, since if version == record.version else now)
            if now - self._over[name][1] >= REMEMBER_S:
                await self.records.delete(record)


def _is_idle(hosted: HostedReplica, now: float) -> bool:
    machine = hosted.machine
    return isinstance(machine, TableMachine) and machine.idle and not len(hosted.waiters) and hosted.replica.serves(now)
