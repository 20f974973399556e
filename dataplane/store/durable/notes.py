"""Small values by name in a data directory, for a node that is started again.

Invariants: they are committed in the order in which they were given, with everything else that the journal writes; a
value with a wrong byte is Corrupt.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Mapping

from dataplane.errors import Corrupt
from dataplane.store.durable.database import Database
from dataplane.store.durable.journal import Journal
from dataplane.store.durable.log import checksum


class Notes:
    """The notes of one kind. Used from the journal's loop."""

    def __init__(self, database: Database, journal: Journal, kind: str) -> None:
        self._database = database
        self._journal = journal
        self.kind = kind

    def load(self) -> dict[str, bytes]:
        """All notes. Raises Corrupt."""
        return self._database.read(self._load)

    def _load(self, sql: sqlite3.Connection) -> dict[str, bytes]:
        found = {}
        for name, value, summed in sql.execute("SELECT name, value, sum FROM notes WHERE kind = ?", (self.kind,)):
            if checksum(self.kind, name, value) != summed:
                path = str(self._database.path)
                raise Corrupt(f"the {self.kind} {name!r} in {path} is not as it was written", path=path)
            found[name] = value
        return found

    def write(self, changes: Mapping[str, bytes | None], *, lazily: bool = False) -> asyncio.Future[None]:
        """Set or delete the values of these names. The future is that of `Journal.write`."""
        kept = [
            (self.kind, name, value, checksum(self.kind, name, value))
            for name, value in changes.items()
            if value is not None
        ]
        gone = [(self.kind, name) for name, value in changes.items() if value is None]

        def work(sql: sqlite3.Connection) -> None:
            sql.executemany("INSERT OR REPLACE INTO notes VALUES (?, ?, ?, ?)", kept)
            sql.executemany("DELETE FROM notes WHERE kind = ? AND name = ?", gone)

        return self._journal.write(work, lazily=lazily)
