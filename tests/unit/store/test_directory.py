from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from dataplane.errors import Corrupt, DirectoryUnusable
from dataplane.replication.log import ExtendLog
from dataplane.replication.messages import LogEntry
from dataplane.store.durable.database import Database, Journal, Notes
from dataplane.store.durable.directory import DataDirectory
from dataplane.store.durable.log import JournaledLog
from tests.cases import each_case
from tests.coordinator import ProcessCoordinator
from tests.mounts import mounted

HOLD = "import sys; from pathlib import Path; from dataplane.store.durable.directory import DataDirectory; \
d = DataDirectory(Path(sys.argv[1])); print(d.identity.node.hex(), flush=True); sys.stdin.read()"


def content(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_a_data_directory_is_used_by_one_process_at_a_time(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path.cwd()) as holder:
        assert holder.stdout is not None
        node = holder.stdout.readline().strip().decode()
        before = content(tmp_path)
        with pytest.raises(DirectoryUnusable, match="another node runs on it") as refused:
            DataDirectory(tmp_path)
        assert refused.value.reason == "in use"
        assert content(tmp_path) == before
        holder.kill()
    opened = DataDirectory(tmp_path)
    assert opened.identity.node.hex() == node
    opened.close()


def _another_program(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("mine")


def _another_database(path: Path) -> None:
    path.mkdir()
    with sqlite3.connect(path / "node.sqlite") as sql:
        sql.execute("CREATE TABLE mine (x)")
        sql.execute("PRAGMA application_id = 7")
    sql.close()


def _another_version(path: Path) -> None:
    DataDirectory(path).close()
    with (path / "node.sqlite").open("r+b") as file:
        file.seek(60)
        file.write((9).to_bytes(4, "big"))


@each_case(
    ("make", "reason"),
    [
        (_another_program, "another program's"),
        (_another_database, "another program's"),
        (lambda path: path.write_text("mine"), "another program's"),
        (lambda path: (path / "node.sqlite").mkdir(parents=True), "another program's"),
        (_another_version, "another version's"),
        (lambda path: DataDirectory(path, "prod").close(), "another cluster's"),
    ],
)
def test_a_directory_that_is_no_data_directory_is_refused_and_unchanged(
    tmp_path: Path, make: Callable[[Path], None], reason: str
) -> None:
    path = tmp_path / "data"
    make(path)
    before, names = content(tmp_path), sorted(os.listdir(tmp_path))
    for _ in range(2):
        with pytest.raises(DirectoryUnusable, match=r"choose|another") as refused:
            DataDirectory(path)
        assert refused.value.reason == reason
        assert str(path) in str(refused.value)
    assert content(tmp_path) == before or reason == "another cluster's"  # which is known once it was opened
    assert sorted(os.listdir(tmp_path)) == names


def test_a_data_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root makes another user's directory")
    path = tmp_path / "data"
    path.mkdir()
    os.chown(path, 4242, -1)
    with pytest.raises(DirectoryUnusable, match="user 4242's"):
        DataDirectory(path)


def test_a_data_directory_on_a_read_only_disk_is_refused(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk") as disk:
        DataDirectory(disk / "data").close()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for path in (disk / "data", disk / "new"):
            with pytest.raises(DirectoryUnusable, match="mount it to be written") as refused:
                DataDirectory(path)
            assert refused.value.reason == "read-only"


def test_an_altered_node_identity_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "data"
    opened = DataDirectory(path)
    opened.database.commit(lambda sql: sql.execute("UPDATE identity SET value = x'93' WHERE name = 'node'"))
    opened.close()
    with pytest.raises(Corrupt, match="identity"):
        DataDirectory(path)


# Notes and logs that the journal of a data directory writes, and a coordinator that keeps its values in them.


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
