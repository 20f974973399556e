"""Partitions that a wiped coordinator has forgotten while nobody led them: who had them is found from the disks.

Leaders that live tell a wiped coordinator themselves. After all nodes were down nobody leads, and the newest
configuration that one replica knows may not be the newest there was. Each change of a configuration was asked for by a
replica that this one names, which noted it first (`remembered`). So the newest is known once every replica was heard
that the newest of the notes heard so far names, or that one of those asked to have in it: nobody of them went on from
there. Those replicas have all that was committed, and the partition goes on with them, in an epoch that is two higher,
which no compare-and-set that is still on its way compares with.

A majority of the replicas is not enough: a leader drops followers that do not answer, and goes on alone. Until all are
back the partition waits; a node that was not seen for a day is given up, as everywhere (`Membership.gone`). A partition
that was deleted while this node was away waits for nobody, and does not come back: who saw that, or that its stream was
dropped, remembers it, and all members are asked.

Records of streams and tables are told again by who has noted them, so that nobody makes another of the name, with
versions and numbers far above any that nodes know which are not back yet.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from dataplane.cluster.membership import Membership
from dataplane.coordinator.base import OutcomeUnknown, Unavailable
from dataplane.errors import DataplaneError, PeerUnavailable
from dataplane.node.partitions import record as records
from dataplane.node.partitions.channel import Channel
from dataplane.node.partitions.hosted import Hosted
from dataplane.node.partitions.record import Record
from dataplane.node.partitions.remembered import Known, Remembered, decode_known
from dataplane.node.partitions.replicas import Replicas
from dataplane.replication.configuration import Configuration, ReplicaId, encode
from dataplane.wire import partition_messages as m

log = logging.getLogger(__name__)

STEP = 1 << 20
"""By how much the version and the next number of a record go up that is told again."""

_LOOK_S = 0.5
_ASK_S = 2.0
_DELETED_S = 5.0  # between questions whether a partition was deleted
_GATHER_S = 10.0  # for which a record waits for nodes that may know a newer one


class Finding:
    """Those of one node. `run` looks until it is cancelled."""

    def __init__(self, replicas: Replicas, members: Membership, channel: Channel, remembered: Remembered) -> None:
        self._replicas = replicas
        self._members = members
        self._channel = channel
        self._remembered = remembered
        self._coordinator = replicas.coordinator
        self.waits: dict[str, tuple[str, ...]] = {}
        """Partitions that are not found yet, and the nodes that each waits for."""
        self._asked_s: dict[str, float] = {}  # when others were asked whether a partition was deleted

    async def run(self) -> None:
        """Look until cancelled."""
        await self._remembered.begun.wait()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tell_records())
            group.create_task(self._look())

    async def _look(self) -> None:
        while True:
            for hosted in self._replicas:
                known = self._remembered.find(hosted.partition)
                if known is None or hosted.configuration.epoch or not self._remembered.forgotten(known.era):
                    self.waits.pop(hosted.partition, None)
                    continue
                try:
                    await self._find(hosted, known)
                except DataplaneError as error:
                    log.info("%s is looked for later: %s", hosted.partition, error)
            await asyncio.sleep(_LOOK_S)

    # Configurations

    async def _find(self, hosted: Hosted, known: Known) -> None:
        """Tell the coordinator who has a partition, if that is known by now."""
        partition, key = hosted.partition, self._replicas.key(hosted.partition)
        if await self._coordinator.read(key) is not None:
            return
        heard: dict[ReplicaId, Known] = {hosted.me: known}
        asked: set[str] = set()
        while wanted := {node for node, _ in named(heard) - heard.keys()} - asked:
            asked |= wanted
            found = await asyncio.gather(*(self._hear(node, partition) for node in wanted))
            heard |= dict(each for each in found if each is not None)
        missing = {node for node, _ in named(heard) - heard.keys()}
        missing = {node for node in missing if not self._members.gone(node, durable=True)}
        again_with = None if missing else again(heard, lambda node: self._members.gone(node, durable=True))
        if missing:
            self._wait(partition, missing)
        if await (self._seen(partition) if again_with is not None else self.deleted(partition)):
            log.warning("%s was deleted while this node was away", partition)
            self._replicas.end(hosted, deleted=True)
            self.waits.pop(partition, None)
        elif again_with is not None:
            log.warning("the coordinator has forgotten %s; its replicas say who they are", partition)
            await self._coordinator.swap(key, None, encode(again_with))

    def _wait(self, partition: str, missing: set[str]) -> None:
        waits = tuple(sorted(missing))
        if self.waits.get(partition) != waits:
            log.warning("%s is not led before it is known what these nodes have of it: %s", partition, ", ".join(waits))
        self.waits[partition] = waits

    async def _hear(self, node: str, partition: str) -> tuple[ReplicaId, Known] | None:
        """The replica of a partition on another node, and what it knows; None where it does not answer, or has none."""
        if self._members.away(node):
            return None
        try:
            incarnation = await self._channel.ask(node, lambda number: m.Recall(number, partition, True), _ASK_S)
            told = await self._channel.ask(node, lambda number: m.Recall(number, partition, False), _ASK_S)
            return ((node, incarnation), decode_known(told)) if incarnation and told else None
        except DataplaneError as error:
            log.debug("node %s does not say what it has of %s: %s", node, partition, error)
            return None

    async def deleted(self, partition: str) -> bool:
        """Whether a member has seen that a partition was deleted, of which the coordinator knows nothing. They are
        asked every few seconds."""
        if self._remembered.was_deleted(partition):
            return True
        loop = asyncio.get_running_loop()
        if self._asked_s.get(partition, -_DELETED_S) > loop.time() - _DELETED_S:
            return False
        self._asked_s[partition] = loop.time()
        if not await self._seen(partition):
            return False
        self._remembered.delete(partition)
        self._asked_s.pop(partition, None)
        return True

    async def _seen(self, partition: str) -> bool:
        """Whether any member has seen that it was deleted."""
        nodes = [node for node in self._members.current if node != self._members.me]
        return self._remembered.was_deleted(partition) or any(
            await asyncio.gather(*(self._has_seen(node, partition) for node in nodes))
        )

    async def _has_seen(self, node: str, partition: str) -> bool:
        try:
            told = await self._channel.ask(node, lambda number: m.Recall(number, partition, False), _ASK_S)
            return bool(told) and decode_known(told).deleted
        except DataplaneError as error:
            log.debug("node %s does not say whether %s was deleted: %s", node, partition, error)
            return False

    # Records

    async def _tell_records(self) -> None:
        """Tell the coordinator those records that it has forgotten."""
        forgotten = {key: each for key, each in self._remembered.records() if self._remembered.forgotten(each.era)}
        loop = asyncio.get_running_loop()
        until = loop.time() + _GATHER_S
        while forgotten:
            for key, record in [*forgotten.items()]:
                try:
                    if await self._told(key, records.decode(record.value), patient=loop.time() < until):
                        del forgotten[key]
                except (Unavailable, OutcomeUnknown, PeerUnavailable) as error:
                    log.info("the record %s is told again later: %s", key, error)
            if forgotten:
                await asyncio.sleep(_LOOK_S)

    async def _told(self, key: str, record: Record, *, patient: bool) -> bool:
        """Tell one, unless it is there, or nodes that may know a newer one are waited for; whether it is there."""
        value = await self._coordinator.read(key)
        if value is None:
            others = self._others(record)
            if patient and any(self._members.away(node) for node in others):
                return False
            if await self._dropped(record):
                self._remembered.keep(key, None)
                return True
            known = [record, *[each for node in others if (each := await self._record(node, key)) is not None]]
            newest = max(known, key=lambda each: each.version)
            log.warning("the coordinator has forgotten %s; this node says what it knows", key)
            again = msgspec.structs.replace(newest, version=newest.version + STEP, next=newest.next + STEP)
            value = await self._coordinator.swap(key, None, records.encode(again))
        return value is not None

    def _others(self, record: Record) -> set[str]:
        """The nodes that may know a newer record: who made its partition, and the replicas of that."""
        known = None if record.key is None else self._remembered.find(record.key)
        replicas = () if known is None else (known.newest.leader, *known.newest.followers)
        return {record.maker, *(node for node, _ in replicas)} - {"", self._members.me}

    async def _dropped(self, record: Record) -> bool:
        """Whether the partition of a record was deleted while this node was away, and the record with it."""
        return record.key is not None and await self._seen(record.key)

    async def _record(self, node: str, key: str) -> Record | None:
        if self._members.away(node):
            return None
        try:
            told = await self._channel.ask(node, lambda number: m.Recall(number, key, False), _ASK_S)
            return records.decode(told) if told else None
        except DataplaneError as error:
            log.debug("node %s does not say what it knows of %s: %s", node, key, error)
            return None


def possible(heard: dict[ReplicaId, Known]) -> list[Configuration]:
    """The newest configuration that was heard of, and those that may have taken its place."""
    newest = max((each.newest for each in heard.values()), key=lambda each: each.epoch)
    return [newest, *(asked for each in heard.values() for asked in each.asked if asked.epoch > newest.epoch)]


def named(heard: dict[ReplicaId, Known]) -> set[ReplicaId]:
    """The replicas that have to be heard."""
    return {replica for each in possible(heard) for replica in (each.leader, *each.followers)}


def again(heard: dict[ReplicaId, Known], gone: Callable[[str], bool]) -> Configuration | None:
    """The configuration to go on with: the newest, without replicas that are given up; None where none is left."""
    newest, *others = possible(heard)
    replicas = [each for each in (newest.leader, *newest.followers) if each in heard and not gone(each[0])]
    if not replicas:
        return None
    return Configuration(max(each.epoch for each in (newest, *others)) + 2, replicas[0], tuple(replicas[1:]))
