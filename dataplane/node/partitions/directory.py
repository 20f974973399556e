"""Creates, opens and drops the streams (or tables) of a cluster, for one node. Each stream or table has one partition.

The record of a stream at the coordinator names its partition. The partition is created first, on the node with the
highest rendezvous hash of the stream's name. The record is written after that, so a partition that a record names
answers requests. When every replica has died, the first node that notices it marks the partition as lost in the record,
and the next node that needs the stream creates another partition. A partition that no record names is deleted by its
leader after a while. `records` describes how records change.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable

from dataplane.background_tasks import BackgroundTasks
from dataplane.clock import Deadline, monotonic
from dataplane.cluster.membership import Membership
from dataplane.cluster.placement import winner
from dataplane.coordinator.base import DELETED, Coordinator
from dataplane.errors import DataplaneError, LimitExceeded, Misuse, PeerUnavailable
from dataplane.node.partitions import record as records
from dataplane.node.partitions.hosted import HostedReplica
from dataplane.node.partitions.record import LostPartition, Record, generation_of, is_durable, kind_of, name_of
from dataplane.node.partitions.records import Records
from dataplane.node.partitions.replicas import Replicas, forget
from dataplane.node.partitions.router import Router
from dataplane.replication.configuration import decode

log = logging.getLogger(__name__)

MAX_RECORDS = 4096
"""The most streams that have a partition, and the most tables that have one."""

CARE_S = 2.0
"""Interval of the checks for lost partitions, and for partitions that no record names."""

_OPEN_S = 10.0  # timeout for the first request to a new partition
_FORGOTTEN_S, _NOWHERE_S = 60.0, 5.0
"""Seconds after which a partition counts as lost if the coordinator has forgotten it and no replica writes its
configuration again. The second number holds if it is not durable and no node has a replica that could do so."""


class Directory:
    """See the module. `opening(record)` returns the first request to a new partition; b"" if there is none. `kind`: the
    kind of all partitions of this directory. A node has one directory of each kind."""

    def __init__(
        self,
        coordinator: Coordinator,
        members: Membership,
        replicas: Replicas,
        router: Router,
        opening: Callable[[Record], bytes],
        *,
        prefix: str = "streams/",
        kind: str = records.STREAMS,
        care_s: float = CARE_S,
    ) -> None:
        self._what = "stream" if kind == records.STREAMS else "table"
        self._kind = kind
        self._coordinator = coordinator
        self._members = members
        self._replicas = replicas
        self._router = router
        self._opening = opening
        self._care_s = care_s
        self._me = members.me
        self._unreported: dict[tuple[str, str], tuple[LostPartition, ...]] = {}
        """By name and generation: lost partitions whose report may have failed, to be reported again."""
        self._prepared: set[str] = set()  # partitions that a record will name later
        self._unnamed: dict[str, float] = {}  # partitions led here that no record names -> since this time
        self._forgotten: dict[str, float] = {}  # partitions that the coordinator has forgotten -> since this time
        self._nodes: set[str] = set()  # all members so far
        self._gone: set[tuple[str, bool]] = set()  # the nodes that were gone at the last check
        self._background = BackgroundTasks()
        self.records = Records(coordinator, self._background, router.forget, prefix)
        replicas.directories[kind] = self
        members.watch(self._came)
        self._came()

    def _came(self) -> None:
        self._nodes |= self._members.current.keys()

    # Records

    async def read_all(self, keys: Iterable[str]) -> None:
        """Read the records of this directory among these keys of the coordinator. Raises as `Records.read`."""
        for key in keys:
            if key.startswith(self.records.prefix):
                await self.records.read(key.removeprefix(self.records.prefix))

    def names(self, partition: str) -> bool:
        """Whether a record known here names the partition, or a prepared stream has it."""
        record = self.records.find(name_of(partition))
        return partition in self._prepared or (record is not None and record.key == partition)

    # Creating

    async def open(self, name: str, settings: bytes | None, *, followers: int = 1, durable: bool = False) -> Record:
        """Return the record of a stream, which may have other settings and no partition. If there is none, create the
        stream with `settings` and a partition. Raises Misuse if there is none and no settings were given, or if a new
        durable stream needs a data directory on this node; LimitExceeded, Unavailable, OutcomeUnknown,
        PeerUnavailable."""
        record = await self.records.read(name)
        if record is None:
            if settings is None:
                raise Misuse(f"there is no {self._what} {name!r}; name its tasks to make it")
            record = await self.placed(self._new(name, settings, followers, durable=durable), None)
        return record

    def _new(self, name: str, settings: bytes, followers: int, *, durable: bool) -> Record:
        if self._me not in self._fit(durable):
            raise Misuse(
                f"the {self._what} {name!r} can't be durable: the node has no data directory; start it with"
                " --data-dir DIR or NodeConfig(data_dir=DIR)"
            )
        if sum(each.key is not None for each in self.records) >= MAX_RECORDS:
            what = f"{self._what}s"
            raise LimitExceeded(
                f"{MAX_RECORDS} {what} are there; drop some", what=what, asked=MAX_RECORDS + 1, limit=MAX_RECORDS
            )
        return Record(0, name, self._kind + secrets.token_hex(4), settings, followers, durable)

    def _fit(self, durable: bool) -> list[str]:
        """The members that can host a partition: all, or those with a data directory if it is `durable`."""
        return [node for node in self._members.current if not durable or self._members.keeps(node)]

    async def placed(self, record: Record, before: Record | None) -> Record:
        """Return the record with a partition; create the partition if there is none. `before`: the present record at
        the coordinator. Raises Unavailable, OutcomeUnknown, PeerUnavailable; Misuse once the stream is dropped."""
        while record.key is None:
            wanted = record.made_by(self._me)
            await self._make(wanted)
            found = await self.records.swap(before, wanted)
            if found != wanted:  # another node has changed the record first
                await self._delete(wanted)
            if found is None or (before is not None and found.generation != record.generation):
                raise Misuse(f"{self._what} {record.name!r} was dropped")
            record = before = found
        return record

    async def _make(self, record: Record) -> None:
        """Create the partition of a record. Raises PeerUnavailable, Unavailable, OutcomeUnknown."""
        there = [node.encode() for node in self._fit(record.durable)] or [self._me.encode()]
        first = winner(there, self._what, record.name).decode()
        key = record.key or ""
        try:
            await self._make_at(first, key, record)
        except PeerUnavailable as error:
            if first == self._me:
                raise
            log.info("node %s refused to lead %s: %s", first, key, error)
            await self._make_at(self._me, key, record)

    async def _make_at(self, node: str, key: str, record: Record) -> None:
        await self._replicas.create(key, node, record.followers, 1 + max(0, record.number) * records.EPOCHS)
        opening = self._opening(record)
        if opening:
            await self._router.ask(key, opening, Deadline.after(_OPEN_S))

    async def prepare(self, name: str, settings: bytes, *, followers: int = 1, durable: bool = False) -> Record:
        """Create the partition of a stream. Returns the stream's record, which is not at the coordinator until
        `publish`. Raises Misuse if there is a stream with this name, or as `open` for a durable one; LimitExceeded,
        Unavailable, OutcomeUnknown, PeerUnavailable."""
        if await self.records.read(name) is not None:
            raise Misuse(f"there is a {self._what} {name!r} already")
        record = self._new(name, settings, followers, durable=durable).made_by(self._me)
        key = record.key or ""
        self._prepared.add(key)
        try:
            await self._make(record)
        except BaseException:
            self._prepared.discard(key)
            raise
        return record

    async def publish(self, record: Record) -> None:
        """Write the record of a prepared stream to the coordinator. May be repeated. Raises Misuse if its name was
        taken meanwhile, Unavailable, OutcomeUnknown."""
        found = await self.records.swap(None, record)
        if found is None or found.generation != record.generation:
            raise Misuse(f"there is a {self._what} {record.name!r} already")
        self._prepared.discard(record.key or "")

    async def discard(self, record: Record) -> None:
        """Delete the partition of a prepared stream, unless the stream was published after all. Raises Unavailable,
        OutcomeUnknown."""
        self._prepared.discard(record.key or "")
        published = await self.records.read(record.name)
        if published is None or published.key != record.key:
            await self._delete(record)

    # Dropping

    async def drop(self, name: str, generation: str = "") -> None:
        """Drop the stream with this name; with `generation`, only if it has that one. Raises Unavailable,
        OutcomeUnknown."""
        while (record := await self.records.read(name)) is not None and generation in ("", record.generation):
            generation = record.generation
            if await self.records.delete(record):
                await self._delete(record)

    async def _delete(self, record: Record) -> None:
        if record.key is not None:
            self._router.forget(record.key)
            await self._replicas.delete(record.key)

    async def lost(self, name: str, key: str) -> bool:
        """If the partition with this key is lost, mark it as lost in the record, and return True; else return False. A
        partition is lost if every replica has died, or if the coordinator has forgotten it and no replica writes its
        configuration again. Raises Unavailable, OutcomeUnknown, Corrupt."""
        record = await self.records.read(name)
        if record is None or record.key != key or not await self._died(key):
            return False
        log.error("every replica of the partition of %s %r has died", self._what, name)
        rows = await self._replicas.retained_rows(key)
        await self.records.change(record, lambda now: self.losing(now, rows) if now.key == key else now)
        return True

    def losing(self, record: Record, rows: list[tuple[str, int]]) -> Record:
        """The record after the loss of its partition."""
        return record.losing(rows)

    async def exists(self, partition: str) -> bool | None:
        """Whether this partition exists, by the coordinator. None if the coordinator has no value for it, for example
        after it lost its data. A partition that no record names, as during a restore, exists until it is deleted or
        every replica has died. The record is watched from then on. Raises as `Records.read`."""
        record = await self.records.read(name_of(partition))
        if record is not None and record.generation == generation_of(partition):
            return record.key == partition
        value = await self._coordinator.read(self._replicas.key(partition))
        return None if value is None else value != DELETED and not _all_gone(self._members, partition, value)

    async def _died(self, partition: str) -> bool:
        key = self._replicas.key(partition)
        value = await self._coordinator.read(key)
        if value is None:
            for_s = monotonic() - self._forgotten.setdefault(partition, monotonic())
            soon = (
                for_s >= _NOWHERE_S and not is_durable(partition) and await self._replicas.recruiting.nowhere(partition)
            )
            if for_s < _FORGOTTEN_S and not soon:
                return False
            value = await self._coordinator.swap(key, None, DELETED)  # from here on no replica can restore it
            self._background.spawn(forget(self._coordinator, key))
            return value == DELETED
        self._forgotten.pop(partition, None)
        return value != DELETED and _all_gone(self._members, partition, value)

    async def take_lost(self, name: str) -> tuple[LostPartition, ...]:
        """Return the lost partitions of a stream that were not reported yet. Each is returned once, or again if an
        earlier call may have failed. Raises as `open` without settings."""
        known = self.records.find(name)
        if known is not None and not known.lost and (name, known.generation) not in self._unreported:
            return ()
        record = await self.open(name, None)
        key = name, record.generation
        unreported = self._unreported.pop(key, ())
        while record.lost:
            lost = tuple(dict.fromkeys((*unreported, *record.lost)))
            wanted = record.told(secrets.token_hex(8))
            try:
                found = await self.records.swap(record, wanted)
            except BaseException:
                self._unreported[key] = lost
                raise
            if found is None or found == wanted:
                return lost
            record = found
        return unreported

    # Periodic checks

    async def run(self) -> None:
        """Check records every `care_s` until cancelled."""
        while True:
            await asyncio.sleep(self._care_s)
            try:
                await self.care()
            except DataplaneError as error:
                log.info("checking the records of %ss failed, and is tried again: %s", self._what, error)

    async def care(self) -> None:
        """Mark lost partitions, and delete partitions that no record names. Raises Unavailable, OutcomeUnknown,
        Corrupt."""
        await self._look_for_lost()
        await self._sweep()

    async def _look_for_lost(self) -> None:
        """Mark partitions as lost. The partitions without a replica here are checked when any node has gone since the
        last check. Those that the coordinator has forgotten are checked each time."""
        gone = {
            (node, durable)
            for node in self._nodes
            for durable in (False, True)
            if self._members.gone(node, durable=durable)
        }
        for record in self.records:
            key = record.key
            if key is not None and self._replicas.find(key) is None and (gone - self._gone or key in self._forgotten):
                await self.lost(record.name, key)
        self._gone = gone
        for partition in self._forgotten.keys() - {record.key for record in self.records}:
            del self._forgotten[partition]

    async def _sweep(self) -> None:
        """Delete partitions led here that no record has named for `lost_s`, since their creators ended before they
        wrote the records."""
        now = monotonic()
        unnamed = {hosted.partition for hosted in self._replicas if hosted.replica.serves(now) and self._orphan(hosted)}
        self._unnamed = {key: self._unnamed.get(key, now) for key in unnamed}
        for key, since_s in list(self._unnamed.items()):
            if now - since_s >= self._members.lost_s and not await self._is_named(key):
                log.warning("deleting partition %s, which no record names", key)
                self._router.forget(key)
                await self._replicas.delete(key)

    def _orphan(self, hosted: HostedReplica) -> bool:
        """Whether no record known here names the partition, and no member may still write such a record."""
        key = hosted.partition
        if kind_of(key) != self._kind or self.names(key):
            return False
        maker = records.maker_of(key)
        return maker == self._me or self._members.away(maker)

    async def _is_named(self, key: str) -> bool:
        """Whether the record at the coordinator names the partition, or the coordinator may have lost the record."""
        value = await self._coordinator.read(self.records.key(name_of(key)))
        if not value:
            return value is None and (self.records.find(name_of(key)) is not None or is_durable(key))
        return records.decode(value).key == key

    def followers(self, partition: str) -> int:
        """The wanted number of followers of a partition."""
        record = self.records.find(name_of(partition))
        return 1 if record is None else record.followers

    async def aclose(self) -> None:
        await self._background.aclose()


def _all_gone(members: Membership, partition: str, value: bytes) -> bool:
    """Whether all replicas of the partition, which has this encoded configuration, have died."""
    configuration, durable = decode(value), is_durable(partition)
    return all(members.gone(node, durable=durable) for node, _ in (configuration.leader, *configuration.followers))
