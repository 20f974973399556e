"""The log of one partition in a data directory: the operations of `replication.log` on SQLite.

Each entry is a row with a checksum of all its values. The log's own row has the indices of its beginning and end, so a
missing entry is detected too.

Invariants: after a restart a log is in the state after a prefix of its operations, which includes all that were
acknowledged, or it is Corrupt; a log of another replica is not changed. Bytes that another program has changed in the
write-ahead log are an exception: SQLite ends the log at its first wrong frame (docs/decisions/0053).
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence

from dataplane.errors import Backpressure, Corrupt, DirectoryUnusable
from dataplane.replication.configuration import ReplicaId
from dataplane.replication.log import ExtendLog, Operation, StoredLog, TruncateLog
from dataplane.replication.messages import LogEntry, StateSnapshot
from dataplane.store.durable.database import Database, Journal, checksum

_INDEX_BITS = 40


class SQLiteStorage:
    """The log `name` of `replica` in a database. Thread-safe."""

    def __init__(self, database: Database, name: str, replica: ReplicaId) -> None:
        """Find or create the log. Raises DirectoryUnusable if it is another replica's or cannot be written, Corrupt if
        it was changed, Backpressure if the disk is full."""
        self._database = database
        self._name = name
        self._replica = replica
        found = database.read(self._found)
        self._id = self._made() if found is None else found[0]

    def _found(self, sql: sqlite3.Connection) -> tuple[int, int, int] | None:
        """The log's number, and the indices before its first entry and of its last; None if there is no log."""
        query = "SELECT id, node, incarnation, base, last, sum FROM logs WHERE name = ?"
        row = sql.execute(query, (self._name,)).fetchone()
        if row is None:
            return None
        number, node, incarnation, base, last, summed = row
        if checksum(number, self._name, node, incarnation, base, last) != summed or not 0 <= base <= last:
            raise self._corrupt("its row is not as it was written")
        if (node, incarnation) != self._replica:
            ours, theirs = ("{}, life {}".format(*who) for who in (self._replica, (node, incarnation)))
            raise DirectoryUnusable(
                f"the log of {self._name} in {self._database.path} is of node {theirs}, and this is node {ours}: give "
                "each node a data directory of its own",
                path=str(self._database.path),
                reason="another node's",
            )
        return number, base, last

    def _made(self) -> int:
        def make(sql: sqlite3.Connection) -> int:
            number: int = sql.execute("SELECT coalesce(max(id), 0) + 1 FROM logs").fetchone()[0]
            summed = checksum(number, self._name, *self._replica, 0, 0)
            sql.execute("INSERT INTO logs VALUES (?, ?, ?, ?, 0, 0, ?)", (number, self._name, *self._replica, summed))
            return number

        return self._database.commit(make)

    def load(self) -> tuple[ReplicaId, StoredLog]:
        """Return the replica that owns the log, and the log. A torn last write is ignored. Raises Corrupt for any other
        wrong byte."""
        return self._replica, self._database.read(self._load)

    def _load(self, sql: sqlite3.Connection) -> StoredLog:
        found = self._found(sql)
        if found is None:
            raise self._corrupt("its row is gone")
        _, base, last = found
        snapshot = self._snapshot(sql, base)
        first = self._place(base + 1)
        query = "SELECT place, epoch, command, sum FROM entries WHERE place >= ? AND place < ? ORDER BY place"
        entries: list[LogEntry] = []
        for place, epoch, command, summed in sql.execute(query, (self._place(0), self._place(1 << _INDEX_BITS))):
            if place != first + len(entries) or checksum(place, epoch, command) != summed:
                raise self._corrupt(f"its entry {base + 1 + len(entries)} is not as it was written")
            entries.append(LogEntry(epoch, command))
        if len(entries) != last - base:
            raise self._corrupt(f"it has {len(entries)} entries, and not {last - base}")
        return StoredLog(snapshot, entries)

    def _snapshot(self, sql: sqlite3.Connection, base: int) -> StateSnapshot:
        row = sql.execute("SELECT epoch, state, sum FROM snapshots WHERE log = ?", (self._id,)).fetchone()
        if row is None and not base:
            return StateSnapshot(0, 0, b"")
        if row is None or checksum(self._id, base, *row[:2]) != row[2]:
            raise self._corrupt("its snapshot is not as it was written")
        return StateSnapshot(base, row[0], row[1])

    def _corrupt(self, what: str) -> Corrupt:
        path = str(self._database.path)
        return Corrupt(f"the log of {self._name} in {path} can not be used: {what}", path=path)

    def _place(self, index: int) -> int:
        return (self._id << _INDEX_BITS) + index

    def write(self, operations: Sequence[Operation]) -> None:
        """Write operations after the earlier ones. Returns once they survive a crash. Raises Backpressure, and writes
        none of them, if there is no room."""
        self._database.commit(lambda sql: self._write(sql, operations))

    def _write(self, sql: sqlite3.Connection, operations: Sequence[Operation]) -> None:
        found = self._found(sql)
        if found is None:
            raise self._corrupt("its row is gone")
        number, base, last = found
        for operation in operations:
            if isinstance(operation, ExtendLog):
                place = self._place(operation.first)
                rows = [
                    (place + i, entry.epoch, entry.command, checksum(place + i, entry.epoch, entry.command))
                    for i, entry in enumerate(operation.entries)
                ]
                if operation.first <= last:
                    self._delete(sql, operation.first, last)
                sql.executemany("INSERT INTO entries VALUES (?, ?, ?, ?)", rows)
                last = operation.first + len(rows) - 1
            elif isinstance(operation, TruncateLog):
                self._delete(sql, operation.last + 1, last)
                last = operation.last
            else:
                snapshot = operation.snapshot
                self._delete(sql, base + 1, snapshot.index if operation.keep else last)
                base = snapshot.index
                last = max(base, last) if operation.keep else base
                self._keep(sql, snapshot)
        summed = checksum(number, self._name, *self._replica, base, last)
        sql.execute("UPDATE logs SET base = ?, last = ?, sum = ? WHERE id = ?", (base, last, summed, number))

    def _delete(self, sql: sqlite3.Connection, first: int, last: int) -> None:
        sql.execute("DELETE FROM entries WHERE place BETWEEN ? AND ?", (self._place(first), self._place(last)))

    def _keep(self, sql: sqlite3.Connection, snapshot: StateSnapshot) -> None:
        row = (self._id, snapshot.epoch, snapshot.state)
        summed = checksum(self._id, snapshot.index, *row[1:])
        sql.execute("INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?)", (*row, summed))


class JournaledLog(SQLiteStorage):
    """A log that is written through the directory's journal, in one commit with the journal's other writes."""

    def __init__(self, database: Database, journal: Journal, name: str, new: ReplicaId) -> None:
        """Find this node's log, of any incarnation, or create it for the replica `new`. Raises as `SQLiteStorage`."""
        found = dict(names(database)).get(name, new)
        super().__init__(database, name, found if found[0] == new[0] else new)
        self._journal = journal
        self._removed = False

    @property
    def refusal(self) -> Backpressure | None:
        """The reason why nothing can be written now, if the disk is full."""
        return self._journal.refusal

    def save(self, operations: Sequence[Operation]) -> asyncio.Future[None]:
        """Write operations after the previous ones. Returns the future of `Journal.write`, with its errors."""
        return self._journal.write(lambda sql: self._write(sql, operations))

    def _write(self, sql: sqlite3.Connection, operations: Sequence[Operation]) -> None:
        if not self._removed:
            super()._write(sql, operations)

    def remove(self) -> asyncio.Future[None]:
        """Delete the log with the next commit. Once the returned future is done, a new log with its name begins empty.
        If the future fails, the next process finds the old log."""
        self._removed = True
        return self._journal.write(self._remove, lazily=True)

    def _remove(self, sql: sqlite3.Connection) -> None:
        sql.execute(
            "DELETE FROM entries WHERE place BETWEEN ? AND ?", (self._place(0), self._place(1 << _INDEX_BITS) - 1)
        )
        sql.execute("DELETE FROM snapshots WHERE log = ?", (self._id,))
        sql.execute("DELETE FROM logs WHERE id = ?", (self._id,))


def names(database: Database) -> list[tuple[str, ReplicaId]]:
    """Return the name and the replica of each log in a database."""
    rows = database.read(lambda sql: sql.execute("SELECT name, node, incarnation FROM logs ORDER BY id").fetchall())
    return [(name, (node, incarnation)) for name, node, incarnation in rows]
