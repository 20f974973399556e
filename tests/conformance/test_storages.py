"""The logs of partitions in a data directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane.errors import Backpressure, Corrupt, DirectoryUnusable
from dataplane.replication.log import ExtendLog
from dataplane.replication.messages import LogEntry
from dataplane.store.durable.database import Database
from dataplane.store.durable.log import SQLiteStorage
from tests.conformance.storages import ME, DurableSuite


def database(directory: Path) -> Database:
    return Database(directory / "node.sqlite")


class TestSQLite(DurableSuite):
    WRITER = "tests.conformance.log_writer"

    @pytest.fixture(autouse=True)
    def databases(self) -> Iterator[None]:
        self.open: dict[Path, Database] = {}
        yield
        for database in self.open.values():
            database.close()

    def opened(self, directory: Path, name: str = "p") -> SQLiteStorage:
        directory.mkdir(exist_ok=True)
        if directory not in self.open:
            self.open[directory] = Database(directory / "node.sqlite")
        return SQLiteStorage(self.open[directory], name, ME)

    def close(self, directory: Path) -> None:
        database = self.open.pop(directory, None)
        if database is not None:
            database.close()

    def may_be_torn(self, name: str) -> bool:
        """SQLite ends its write-ahead log at the first wrong checksum."""
        return name.endswith("-wal")


def test_a_log_of_another_replica_is_refused_and_unchanged(tmp_path: Path) -> None:
    store = database(tmp_path)
    SQLiteStorage(store, "p", ME).write([ExtendLog(1, (LogEntry(1, b"x"),))])
    for other in (("another", 7), ("node", 8)):
        with pytest.raises(DirectoryUnusable, match="data directory of its own") as refused:
            SQLiteStorage(store, "p", other)
        assert refused.value.reason == "another node's"
    assert SQLiteStorage(store, "p", ME).load()[1].entries == [LogEntry(1, b"x")]
    store.close()


@pytest.mark.parametrize("change", ["base = base + 1", "last = last - 1", "node = 'x'", "incarnation = 8"])
def test_a_row_that_was_changed_is_corrupt(tmp_path: Path, change: str) -> None:
    store = database(tmp_path)
    SQLiteStorage(store, "p", ME).write([ExtendLog(1, (LogEntry(1, b"x"), LogEntry(1, b"y")))])
    store.commit(lambda sql: sql.execute(f"UPDATE logs SET {change}"))
    with pytest.raises(Corrupt, match="its row is not as it was written"):
        SQLiteStorage(store, "p", ME).load()
    store.close()


def test_a_log_write_to_a_full_disk_is_refused_and_later_writes_succeed(tmp_path: Path) -> None:
    store = database(tmp_path)
    a, b = SQLiteStorage(store, "a", ME), SQLiteStorage(store, "b", ME)
    a.write([ExtendLog(1, (LogEntry(1, b"before"),))])
    pages = store.read(lambda sql: sql.execute("PRAGMA page_count").fetchone()[0])
    store.read(lambda sql: sql.execute(f"PRAGMA max_page_count = {pages + 4}").fetchone())
    with pytest.raises(Backpressure) as refused:
        a.write([ExtendLog(2, (LogEntry(1, b""), LogEntry(1, bytes(1 << 20))))])
    assert "full" in refused.value.spill_error
    a.write([ExtendLog(2, (LogEntry(1, b"small"),))])
    b.write([ExtendLog(1, (LogEntry(1, b"beside"),))])
    store.read(lambda sql: sql.execute("PRAGMA max_page_count = 100000").fetchone())
    a.write([ExtendLog(3, (LogEntry(1, bytes(1 << 20)),))])
    assert [entry.command[:6] for entry in a.load()[1].entries] == [b"before", b"small", bytes(6)]
    assert b.load()[1].entries == [LogEntry(1, b"beside")]
    store.close()
