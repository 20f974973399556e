"""Notes and logs that the journal of a data directory writes, and a coordinator that keeps its values in them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dataplane.coordinator.process import ProcessCoordinator
from dataplane.errors import Corrupt
from dataplane.replication.log import ExtendLog
from dataplane.replication.messages import LogEntry
from dataplane.store.durable.database import Database, DirectoryUnusable, Journal, Notes
from dataplane.store.durable.log import JournaledLog


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[tuple[Database, Journal]]:
    database = Database(directory / "node.sqlite")
    journal = Journal(database)
    try:
        yield database, journal
    finally:
        journal.close()
        database.close()


async def test_notes_persist_and_are_separated_by_kind(tmp_path: Path) -> None:
    async with opened(tmp_path) as (database, journal):
        notes, others = Notes(database, journal, "a"), Notes(database, journal, "b")
        await notes.write({"x": b"1", "y": b"2"})
        await others.write({"x": b"3"})
        await notes.write({"x": None, "y": b"4", "z": b""}, lazily=True)
    async with opened(tmp_path) as (database, journal):
        assert Notes(database, journal, "a").load() == {"y": b"4", "z": b""}
        assert Notes(database, journal, "b").load() == {"x": b"3"}


async def test_a_note_with_a_wrong_byte_is_corrupt(tmp_path: Path) -> None:
    async with opened(tmp_path) as (database, journal):
        notes = Notes(database, journal, "a")
        await notes.write({"x": b"right"})
        await journal.write(lambda sql: sql.execute("UPDATE notes SET value = ?", (b"wrong",)) and None)
        with pytest.raises(Corrupt, match="the a 'x' in"):
            notes.load()


async def test_a_log_keeps_its_incarnation_and_is_refused_for_another_node(tmp_path: Path) -> None:
    async with opened(tmp_path) as (database, journal):
        await JournaledLog(database, journal, "p", ("n", 1)).save([ExtendLog(1, (LogEntry(1, b"c"),))])
    async with opened(tmp_path) as (database, journal):
        replica, stored = JournaledLog(database, journal, "p", ("n", 2)).load()
        assert replica == ("n", 1)
        assert stored.entries == [LogEntry(1, b"c")]
        with pytest.raises(DirectoryUnusable):
            JournaledLog(database, journal, "p", ("other", 1))


async def test_a_restarted_coordinator_has_all_acknowledged_values(tmp_path: Path) -> None:
    async with opened(tmp_path) as (database, journal):
        notes = Notes(database, journal, "coordinator")

        async def keep(key: str, value: bytes | None) -> None:
            await notes.write({key: value})

        coordinator = ProcessCoordinator(keep=keep)
        assert await coordinator.swap("a", None, b"1") == b"1"
        assert await coordinator.swap("b", None, b"1") == b"1"
        assert await coordinator.swap("b", b"1", None) is None
        assert await coordinator.swap("a", b"0", b"2") == b"1"
    async with opened(tmp_path) as (database, journal):
        again = ProcessCoordinator(values=Notes(database, journal, "coordinator").load())
        assert await again.read("a") == b"1"
        assert await again.read("b") is None
