"""What a node remembers on its disk of what the coordinator had of durable partitions, in case that is wiped.

Of each partition: the newest configuration that its replica here knows, and those that it has asked for in its place;
of each durable stream or table: its record. Each note says in which era of the coordinator it was made: the era is a
value of the coordinator's own, made at random by whoever finds none. So a value that is missing in the era of the note
was deleted, and one that is missing in another was forgotten.

What always holds: a configuration is on disk before the replica here takes its role in it, and before it is asked for.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterator

import msgspec

from dataplane.coordinator.base import Coordinator, OutcomeUnknown, Unavailable
from dataplane.errors import Corrupt
from dataplane.node.partitions.background import Background
from dataplane.node.partitions.record import decode, name_of
from dataplane.replication.configuration import Configuration
from dataplane.store.durable.notes import Notes

log = logging.getLogger(__name__)

PREFIXES = "streams/", "tables/"
"""Of the coordinator's keys of records."""

ERA = "era"
"""The coordinator's key of its era."""

MAX_DELETED = 4096
"""Deleted partitions that a node remembers, to tell nodes that were away."""

_AGAIN_S = 0.5
_DELETED = Configuration(0, ("", 0))


class Known(msgspec.Struct, frozen=True, array_like=True):
    """Of one partition: the newest configuration that is known, in this era, and those asked for in its place."""

    era: bytes
    newest: Configuration
    asked: tuple[Configuration, ...] = ()

    @property
    def deleted(self) -> bool:
        """Whether the partition was deleted, as this node has seen."""
        return not self.newest.epoch


class Note(msgspec.Struct, frozen=True, array_like=True):
    """The value of a key of the coordinator in this era."""

    era: bytes
    value: bytes


_encode = msgspec.msgpack.Encoder().encode
_known = msgspec.msgpack.Decoder(Known)
_record = msgspec.msgpack.Decoder(Note)


def decode_known(value: bytes) -> Known:
    """Raises Corrupt for what no node wrote."""
    try:
        return _known.decode(value)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"this is no note of a partition's configuration: {error}") from None


class Remembered:
    """See the module. `run` it until it is cancelled."""

    def __init__(self, coordinator: Coordinator, configurations: Notes, records: Notes) -> None:
        """Raises Corrupt where what was noted is not as it was written."""
        self._coordinator = coordinator
        self._configurations, self._records = configurations, records
        self._known = {name: decode_known(value) for name, value in configurations.load().items()}
        self._values = {key: _record.decode(value) for key, value in records.load().items()}
        self._before = {**self._values}
        self._unstamped: set[str] = set()  # partitions that were seen before the era was known
        self._epochs: dict[str, int] = {}  # of configurations that are on disk, since the start
        self.era = b""
        """That of the coordinator; empty until it is known."""
        self.begun = asyncio.Event()
        """Set once the era is known."""
        self._background = Background()

    # The era

    async def run(self) -> None:
        """Watch the era, and make one where there is none, until cancelled."""
        while True:
            try:
                async for value in self._coordinator.watch(ERA):
                    self.era = value or await self._coordinator.swap(ERA, None, secrets.token_bytes(8)) or b""
                    self.begun.set()
                    unstamped, self._unstamped = self._unstamped, set()
                    for partition in unstamped:
                        self.seen(partition)
            except (Unavailable, OutcomeUnknown) as error:
                log.debug("the coordinator does not say its era: %s", error)
            await asyncio.sleep(_AGAIN_S)

    def forgotten(self, era: bytes) -> bool:
        """Whether what was noted in that era, and the coordinator has not, was forgotten and not deleted."""
        return bool(self.era) and era != self.era

    def missing(self, partition: str) -> bool:
        """Whether a partition that the coordinator does not have may be found again: by what was noted of it, or of
        the stream or table that had it."""
        known = self._known.get(partition)
        if known is not None and known.deleted:
            return False
        eras = [] if known is None else [known.era]
        for prefix in PREFIXES:
            record = self._before.get(prefix + name_of(partition))
            if record is not None and decode(record.value).key == partition:
                eras.append(record.era)
        return any(not self.era or self.forgotten(era) for era in eras)

    # Configurations

    def find(self, partition: str) -> Known | None:
        """What is known of a partition that was not deleted."""
        known = self._known.get(partition)
        return None if known is None or known.deleted else known

    def has(self, partition: str, epoch: int) -> bool:
        """Whether it is on disk, in this life, that this epoch is known."""
        return self._epochs.get(partition, 0) >= epoch

    async def know(self, partition: str, configuration: Configuration) -> None:
        """A newer configuration is known, once this returns. Raises as `Journal.write`."""
        known = self._known.get(partition)
        if known is None or configuration.epoch > known.newest.epoch:
            self._known[partition] = Known(b"" if known is None else known.era, configuration)
        await self._write(partition)
        self._epochs[partition] = max(self._epochs.get(partition, 0), configuration.epoch)

    def seen(self, partition: str) -> None:
        """The coordinator has a configuration of this partition."""
        known = self.find(partition)
        if not self.era:
            self._unstamped.add(partition)
        elif known is not None and known.era != self.era:
            self._known[partition] = msgspec.structs.replace(known, era=self.era)
            self._background.spawn(self._write(partition))

    async def ask(self, partition: str, wanted: Configuration) -> None:
        """A configuration is about to be asked for. Raises as `Journal.write`."""
        known = self.find(partition)
        if known is not None and wanted.epoch > known.newest.epoch and wanted not in known.asked:
            self._known[partition] = msgspec.structs.replace(known, asked=(*known.asked, wanted))
            await self._write(partition)

    async def _write(self, partition: str) -> None:
        known = self._known.get(partition)
        await self._configurations.write({partition: None if known is None else _encode(known)})

    def forget(self, partition: str) -> None:
        """There is no replica of it here any more."""
        if self._known.pop(partition, None) is not None:
            self._configurations.write({partition: None}, lazily=True)

    def delete(self, partition: str) -> None:
        """The partition was deleted, which nodes that were away are told by this one."""
        self._known.pop(partition, None)
        self._known[partition] = Known(self.era, _DELETED)
        notes: dict[str, bytes | None] = {partition: _encode(self._known[partition])}
        deleted = [name for name, known in self._known.items() if known.deleted]
        for oldest in deleted[: len(deleted) - MAX_DELETED] if len(deleted) > MAX_DELETED else ():
            del self._known[oldest]
            notes[oldest] = None
        self._background.spawn(self._wait(self._configurations.write(notes)))

    def was_deleted(self, partition: str) -> bool:
        """Whether this node knows that a partition was deleted."""
        known = self._known.get(partition)
        return known is not None and known.deleted

    def told(self, name: str) -> bytes:
        """What another node is told of a partition, or of a key of the coordinator; empty for nothing."""
        if name in self._known:
            return _encode(self._known[name])
        return self._values[name].value if name in self._values else b""

    # Records

    def records(self) -> Iterator[tuple[str, Note]]:
        return iter([*self._values.items()])

    def record(self, key: str) -> Note | None:
        """What was noted of this key of the coordinator."""
        return self._values.get(key)

    def keep(self, key: str, value: bytes | None) -> None:
        """The coordinator has this value now; None: the key was deleted."""
        if value is None:
            if self._values.pop(key, None) is not None:
                self._background.spawn(self._wait(self._records.write({key: None})))
        elif self._values.get(key) != (record := Note(self.era, value)):
            self._values[key] = record
            self._background.spawn(self._wait(self._records.write({key: _encode(record)})))

    async def _wait(self, written: asyncio.Future[None]) -> None:
        await written

    async def aclose(self) -> None:
        """Idempotent."""
        await self._background.aclose()
