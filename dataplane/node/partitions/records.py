"""One node's copies of the records of streams (or of tables), and its changes of them at the coordinator.

Invariants: a record is changed only by compare-and-set. A node whose compare-and-set fails repeats its change on the
newer record. Of two versions of a record the newer one is kept. A dropped stream is not found again. A record is
watched while it exists. A missing record was dropped if the coordinator still has the era in which the record was seen.
In another era the coordinator has lost its values, and the nodes write their copies.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator

from dataplane.background_tasks import BackgroundTasks
from dataplane.coordinator.base import Coordinator, Unavailable
from dataplane.errors import Corrupt, OutcomeUnknown
from dataplane.node.partitions import era
from dataplane.node.partitions.record import Record, decode, encode, generation_of, name_of

log = logging.getLogger(__name__)

MAX_DROPPED = 4096
"""The most generations of dropped streams that are remembered, so that late answers about them are recognised."""

_SHORT_S, _LONG_S = 0.005, 0.1  # the first and the longest pause between attempts to change a record
_AGAIN_S, _AGAIN_MOST_S = 0.5, 8.0  # the first and the longest pause between attempts to watch a record


class Records:
    """See the module. `forget_key(partition)` is called with each partition that its record no longer names."""

    def __init__(
        self, coordinator: Coordinator, background: BackgroundTasks, forget_key: Callable[[str], None], prefix: str
    ) -> None:
        self._coordinator = coordinator
        self._background = background
        self._forget_key = forget_key
        self.prefix = prefix
        """The prefix of the keys of records at the coordinator."""
        self._records: dict[str, Record] = {}
        self._watched: set[str] = set()
        self._eras: dict[str, bytes] = {}  # by stream: the coordinator's era in which its watch has seen the record
        self._dropped: dict[str, None] = {}  # generations
        self.changed: Callable[[str], None] = lambda partition: None
        """Called with each partition that a newer version of its record no longer names."""
        self.dropped: Callable[[Record], None] = lambda record: None
        """Called with the last record of each stream that was dropped."""

    def __iter__(self) -> Iterator[Record]:
        return iter([*self._records.values()])

    def key(self, name: str) -> str:
        """The key of the record at the coordinator."""
        return self.prefix + name

    def find(self, name: str) -> Record | None:
        """The record as last seen here; None if there is none."""
        return self._records.get(name)

    def may_have(self, partition: str) -> bool:
        """Whether a record may name this partition. False if the record here names another, or the stream was
        dropped."""
        record = self._records.get(name_of(partition))
        return generation_of(partition) not in self._dropped if record is None else record.key == partition

    async def read(self, name: str) -> Record | None:
        """Read the record at the coordinator, and watch it from then on. Returns None if there is none. Raises
        Unavailable, Corrupt; OutcomeUnknown if a lost record is written again."""
        known = self._records.get(name)
        value = await self._coordinator.read(self.key(name))
        if value is None:
            return None if known is None else await self._missing(known)
        self.watch(name)
        return self._saw(decode(value))

    async def _missing(self, known: Record) -> Record | None:
        """Write a record again if the coordinator has lost it. Else forget it, and return None. Raises Unavailable,
        OutcomeUnknown, Corrupt."""
        now = await era.current(self._coordinator)
        if self._eras.get(known.name, now) == now:
            self.forget(known.name, known.generation)
            return None
        log.warning("the coordinator has lost the record of %r; this node writes its copy", known.name)
        return await self.swap(None, known)

    async def delete(self, record: Record) -> bool:
        """Delete a record, and forget it. Returns False, without a deletion, if the record has changed. Raises
        Unavailable, OutcomeUnknown."""
        if await self._coordinator.swap(self.key(record.name), encode(record), None) is not None:
            return False
        self.forget(record.name, record.generation)
        return True

    def forget(self, name: str, generation: str) -> None:
        """Forget the record of this generation, since its stream was dropped."""
        self._dropped[generation] = None
        if len(self._dropped) > MAX_DROPPED:
            del self._dropped[next(iter(self._dropped))]
        record = self._records.get(name)
        if record is not None and record.generation == generation:
            del self._records[name]
            self._eras.pop(name, None)
            if record.key is not None:
                self._forget_key(record.key)
            self.dropped(record)

    async def swap(self, expected: Record | None, wanted: Record) -> Record | None:
        """Compare-and-set a record; None expects no record. Returns the record after that; None if there is none.
        Raises Unavailable, OutcomeUnknown, Corrupt."""
        before = None if expected is None else encode(expected)
        value = await self._coordinator.swap(self.key(wanted.name), before, encode(wanted))
        if value is None:
            return None
        self.watch(wanted.name)
        return self._saw(decode(value))

    def _saw(self, record: Record) -> Record | None:
        """Note a record that was read. Returns the newest known one; None if the stream was dropped meanwhile."""
        if record.generation in self._dropped:
            return self._records.get(record.name)
        before = self._records.get(record.name)
        if before is None or before.generation != record.generation or before.version < record.version:
            self._records[record.name] = record
            if before is not None and before.key is not None and before.key != record.key:
                self._forget_key(before.key)
                self.changed(before.key)
        return self._records[record.name]

    async def change(self, record: Record, make: Callable[[Record], Record]) -> Record:
        """Replace a record by `make(record)`. If another change came first, repeat this with the newer version. `make`
        returns its argument to change nothing. Returns the newest known version. Raises Unavailable, OutcomeUnknown,
        Corrupt."""
        pause_s = _SHORT_S
        while (wanted := make(record)) is not record:
            found = await self.swap(record, wanted)
            if found is None or found.generation != record.generation or found == wanted:
                return found or record
            await asyncio.sleep(pause_s * random.uniform(0.0, 1.0))
            pause_s = min(2 * pause_s, _LONG_S)
            now = self._records.get(found.name)
            record = found if now is None or now.generation != found.generation else now
        return record

    def watch(self, name: str) -> None:
        if name not in self._watched:
            self._watched.add(name)
            self._background.spawn(self._watching(name))

    async def _watching(self, name: str) -> None:
        pause_s = _AGAIN_S
        while True:
            try:
                now = await era.current(self._coordinator)  # no watch outlives a coordinator that loses its values
                async for value in self._coordinator.watch(self.key(name)):
                    pause_s = _AGAIN_S
                    if value is not None:
                        self._eras[name] = now
                        self._saw(decode(value))
                    elif await self.read(name) is None:  # dropped, and not created again since
                        self._watched.discard(name)  # the next `read` watches it again
                        return
            except (Unavailable, OutcomeUnknown) as error:
                log.debug("the coordinator does not answer for %s: %s", name, error)
            except Corrupt as error:
                log.error("%s: %s", self.key(name), error)
                self._eras[name] = b""  # when this value is deleted, the nodes write their copies
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _AGAIN_MOST_S)
