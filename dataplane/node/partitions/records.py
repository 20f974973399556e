"""The placement tables of one node's streams (or tables): as it knows them, and how it changes them.

What always holds: a table changes by compare-and-set alone, and who loses makes the change again from the newer one; of
two tables of one stream the newer one stays, and one that was dropped is never seen again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator

from dataplane.coordinator.base import DELETED, Coordinator, Unavailable
from dataplane.errors import Corrupt, OutcomeUnknown
from dataplane.node.partitions import table as tables
from dataplane.node.partitions.background import Background
from dataplane.node.partitions.remembered import Remembered
from dataplane.node.partitions.table import Table

log = logging.getLogger(__name__)

MAX_DROPPED = 4096
"""Generations of streams that were dropped, by which late answers are told."""

SHORT_S, LONG_S = 0.005, 0.1
"""Between tries to change a table, at most."""

_AGAIN_S, _AGAIN_MOST_S = 0.5, 8.0  # between tries to watch


class Records:
    """See the module. `forget_key(partition)` is called with partitions that there are no more."""

    def __init__(
        self,
        coordinator: Coordinator,
        remembered: Remembered | None,
        background: Background,
        forget_key: Callable[[str], None],
        prefix: str,
    ) -> None:
        self._coordinator = coordinator
        self._remembered = remembered
        self._background = background
        self._forget_key = forget_key
        self.prefix = prefix
        """Of the keys of tables, at the coordinator."""
        self._tables: dict[str, Table] = {}
        self._watched: set[str] = set()
        self._dropped: dict[str, None] = {}  # generations of streams that were dropped
        self.changed: Callable[[Table], None] = lambda table: None
        """Called with each newer table."""
        self.dropped: Callable[[Table], None] = lambda table: None
        """Called with the last table of a stream that is known to have been dropped."""
        self.settled: Callable[[str, str], None] = lambda stream, generation: None
        """Called where nothing is asked by older sets of open partitions any more."""

    def __iter__(self) -> Iterator[Table]:
        return iter([*self._tables.values()])

    def key(self, stream: str) -> str:
        """Of the stream's table, at the coordinator."""
        return self.prefix + stream

    def find(self, stream: str) -> Table | None:
        """The table as last seen here."""
        return self._tables.get(stream)

    async def read(self, stream: str) -> Table | None:
        """The table as it is now, which is watched from here on. Raises Unavailable, Corrupt."""
        known = self._tables.get(stream)
        value = await self._coordinator.read(self.prefix + stream)
        if value is None and stream in self._tables:
            return await self._restore(stream)
        if not value:
            self._check_forgotten(stream, value)
            self.gone(stream, known)
            return None
        self.watch(stream)
        return self._saw(tables.decode(value))

    def _check_forgotten(self, stream: str, value: bytes | None) -> None:
        """Raises Unavailable where a coordinator that was wiped has to be told of it first (`finding`)."""
        remembered = self._remembered
        noted = None if remembered is None or value is not None else remembered.record(self.prefix + stream)
        if noted is not None and remembered is not None and (not remembered.era or remembered.forgotten(noted.era)):
            raise Unavailable(f"the coordinator has forgotten {stream!r}; it is told again once its nodes are there")

    async def _restore(self, stream: str) -> Table | None:
        """The coordinator has forgotten a stream that is known here."""
        log.warning("the coordinator has forgotten stream %r; this node says what it knows", stream)
        return await self.swap(None, self._tables[stream])

    def forget(self, stream: str, generation: str) -> None:
        """Another node has dropped the stream of this generation."""
        self._dropped[generation] = None
        if len(self._dropped) > MAX_DROPPED:
            del self._dropped[next(iter(self._dropped))]
        self.settled(stream, generation)
        table = self._tables.get(stream)
        if table is not None and table.generation == generation:
            del self._tables[stream]
            self._note_gone(stream)
            for key in table.keys:
                self._forget_key(key)
                if table.durable and self._remembered is not None:
                    self._remembered.delete(key)  # also where every replica is down, and sees it as late as that
            self.dropped(table)

    def gone(self, stream: str, table: Table | None) -> None:
        """The coordinator has no stream of this name; `table` is what was known when it was asked."""
        if table is not None:
            self.forget(table.stream, table.generation)
        elif stream not in self._tables:
            self._note_gone(stream)

    def _note_gone(self, stream: str) -> None:
        if self._remembered is not None:
            self._remembered.keep(self.prefix + stream, None)

    async def swap(self, expected: Table | None, wanted: Table) -> Table | None:
        """Compare-and-set a table; the one that there is afterwards."""
        before = None if expected is None else tables.encode(expected)
        key = self.prefix + wanted.stream
        value = await self._coordinator.swap(key, before, tables.encode(wanted))
        if value == DELETED and expected is None:
            value = await self._coordinator.swap(key, DELETED, tables.encode(wanted))
        return self._saw(tables.decode(value)) if value else None

    def _saw(self, table: Table) -> Table | None:
        """A table was read; the newest that is known. None for one that was dropped since."""
        if table.generation in self._dropped:
            return self._tables.get(table.stream)
        before = self._tables.get(table.stream)
        if not table.older or (before is not None and before.generation != table.generation):
            self.settled(table.stream, table.generation)
        if before is None or before.generation != table.generation or before.version < table.version:
            self._tables[table.stream] = table
            for key in () if before is None else before.keys - table.keys:
                self._forget_key(key)
            self.changed(table)
        table = self._tables[table.stream]
        if table.durable and self._remembered is not None:
            self._remembered.keep(self.prefix + table.stream, tables.encode(table))
        return self._tables[table.stream]

    async def change(self, table: Table, make: Callable[[Table], Table]) -> Table:
        """Change a table, from whatever it is by then."""
        pause_s = SHORT_S
        while (wanted := make(table)) is not table:
            found = await self.swap(table, wanted)
            if found is None or found.generation != table.generation or found == wanted:
                return found or table
            await asyncio.sleep(pause_s * random.uniform(0.0, 1.0))
            pause_s = min(2 * pause_s, LONG_S)
            table = self.latest(found)
        return table

    def latest(self, table: Table) -> Table:
        """The same table as last seen here."""
        now = self._tables.get(table.stream)
        return table if now is None or now.generation != table.generation else now

    def watch(self, stream: str) -> None:
        if stream not in self._watched:
            self._watched.add(stream)
            self._background.spawn(self._watching(stream))

    async def _watching(self, stream: str) -> None:
        pause_s = _AGAIN_S
        while True:
            try:
                async for value in self._coordinator.watch(self.prefix + stream):
                    pause_s = _AGAIN_S
                    if value is not None and not await self._see(stream, value):
                        self._watched.discard(stream)  # who asks for it again watches it again
                        return
                    if value is None and stream in self._tables:
                        await self._restore(stream)
            except (Unavailable, OutcomeUnknown) as error:
                log.debug("the coordinator does not answer for %s: %s", stream, error)
            except Corrupt as error:
                log.error("%s%s: %s", self.prefix, stream, error)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _AGAIN_MOST_S)

    async def _see(self, stream: str, value: bytes) -> bool:
        """A value was seen, which may not be the last by now; whether there is a stream."""
        known = self._tables.get(stream)
        if value == DELETED:
            value = await self._coordinator.read(self.prefix + stream) or DELETED
        if value == DELETED:
            self.gone(stream, known)
            return False
        self._saw(tables.decode(value))
        return True
