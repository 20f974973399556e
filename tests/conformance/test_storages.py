"""The logs of partitions in a data directory: kills, disks that lose what was not synced, changed bytes, full disks."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataplane.errors import Backpressure, Corrupt, DirectoryUnusable, Rejected
from dataplane.replication.configuration import ReplicaId
from dataplane.replication.log import ExtendLog, Operation, RebaseLog, StoredLog, TruncateLog
from dataplane.replication.messages import LogEntry, StateSnapshot
from dataplane.store.durable.database import Database
from dataplane.store.durable.log import SQLiteStorage
from tests.simulation.disk import apply

ME: ReplicaId = ("node", 7)


def entries(draw: random.Random, count: int, most: int = 300) -> tuple[LogEntry, ...]:
    return tuple(LogEntry(draw.randint(1, 5), draw.randbytes(draw.choice([0, 1, 20, most]))) for _ in range(count))


def operations(draw: random.Random) -> Iterator[tuple[Operation, StoredLog]]:
    """Operations as a log says them, each with what they have made so far."""
    made = StoredLog()
    while True:
        base, last = made.snapshot.index, made.snapshot.index + len(made.entries)
        kind = draw.choices(("extend", "truncate", "compact", "install"), (12, 2, 2, 1))[0]
        operation: Operation
        if kind == "extend":
            operation = ExtendLog(last + 1, entries(draw, draw.randint(1, 6)))
        elif kind == "truncate":
            operation = TruncateLog(draw.randint(base, last))
        elif kind == "compact":
            operation = RebaseLog(
                StateSnapshot(draw.randint(base, last), 2, draw.randbytes(draw.choice([0, 90]))), True
            )
        else:
            operation = RebaseLog(StateSnapshot(last + draw.randint(0, 9), 3, draw.randbytes(9000)), False)
        apply(made, operation)
        yield operation, StoredLog(made.snapshot, made.entries.copy())


def database(directory: Path) -> Database:
    return Database(directory / "node.sqlite")


class TestSQLite:
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
        """Close all that was opened there, and leave the files as they are."""
        database = self.open.pop(directory, None)
        if database is not None:
            database.close()

    def test_a_new_log_is_empty(self, tmp_path: Path) -> None:
        assert self.opened(tmp_path).load() == (ME, StoredLog())

    @pytest.mark.parametrize("seed", range(2))
    def test_log_operations_have_their_effects(self, tmp_path: Path, seed: int) -> None:
        draw = random.Random(seed)
        storage = self.opened(tmp_path)
        batch: list[Operation] = []
        for number, (operation, made) in enumerate(operations(draw)):
            batch.append(operation)
            if draw.random() < 0.5:
                storage.write(batch)
                batch = []
                assert storage.load() == (ME, made)
            if number == 150:
                break

    def test_a_loaded_log_is_a_copy(self, tmp_path: Path) -> None:
        storage = self.opened(tmp_path)
        storage.write([ExtendLog(1, (LogEntry(1, b"a"),))])
        storage.load()[1].entries.clear()
        assert storage.load()[1].entries == [LogEntry(1, b"a")]

    def test_large_commands_and_snapshots_round_trip(self, tmp_path: Path) -> None:
        storage = self.opened(tmp_path)
        command, state = random.Random(0).randbytes(3 << 20), random.Random(1).randbytes(17 << 20)
        storage.write(
            [ExtendLog(1, (LogEntry(1, b""), LogEntry(1, command))), RebaseLog(StateSnapshot(1, 1, state), True)]
        )
        assert storage.load()[1] == StoredLog(StateSnapshot(1, 1, state), [LogEntry(1, command)])

    def reopened(self, directory: Path) -> StoredLog:
        storage = self.opened(directory)
        try:
            return storage.load()[1]
        finally:
            self.close(directory)

    def test_logs_in_one_storage_are_independent(self, tmp_path: Path) -> None:
        draw = random.Random(6)
        makers = {name: operations(random.Random(name)) for name in ("a", "b", "a/b")}
        logs = {name: self.opened(tmp_path, name) for name in makers}
        made = {name: StoredLog() for name in makers}
        for _ in range(120):
            name = draw.choice(list(makers))
            operation, made[name] = next(makers[name])
            logs[name].write([operation])
        self.close(tmp_path)
        assert {name: self.opened(tmp_path, name).load()[1] for name in makers} == made

    def test_a_crash_loses_only_operations_that_were_not_synced(self, tmp_path: Path) -> None:
        """After each write the files are copied; a later file is a copy of then with anything of what came after."""
        draw, disk, crashed = random.Random(7), tmp_path / "disk", tmp_path / "crashed"
        storage = self.opened(disk)
        made = operations(draw)
        history, synced, before = [StoredLog()], 0, _files(disk)
        for _ in range(20):
            several = list(itertools.islice(made, draw.randint(1, 4)))
            storage.write([operation for operation, _ in several])
            history += [now for _, now in several]
            after = _files(disk)
            for _ in range(2):
                shutil.rmtree(crashed, ignore_errors=True)
                _tear(crashed, before, after, draw)
                there = self.reopened(crashed)
                assert there in history[synced:], "a part of what was written, and all that was synced"
            synced, before = len(history) - 1, after
        self.close(disk)

    def test_a_log_with_a_flipped_bit_is_refused(self, tmp_path: Path) -> None:
        draw, disk, copy = random.Random(8), tmp_path / "disk", tmp_path / "copy"
        storage = self.opened(disk)
        history = [StoredLog()]
        for operation, now in itertools.islice(operations(draw), 60):
            storage.write([operation])
            history.append(now)
        last = ExtendLog(history[-1].snapshot.index + len(history[-1].entries) + 1, entries(draw, 100, most=2000))
        storage.write([last])
        history.append(StoredLog(history[-1].snapshot, [*history[-1].entries, *last.entries]))
        open_files = _files(disk)
        self.close(disk)
        closed_files, refused = _files(disk), 0
        for files in [open_files, closed_files] * 40:
            name = draw.choice(sorted(files))
            position = draw.randrange(len(files[name]))
            content = bytearray(files[name])
            content[position] ^= 1 << draw.randrange(8)
            shutil.rmtree(copy, ignore_errors=True)
            _write(copy, files | {name: bytes(content)})
            try:
                there = self.reopened(copy)
            except (Corrupt, Rejected):
                refused += 1
                continue
            assert there == history[-1] or (name.endswith("-wal") and there in history), (name, position)
        assert refused > 10

    @pytest.mark.parametrize("kills", [int(os.environ.get("KILLS", "2"))])
    def test_acknowledged_log_writes_survive_random_kills(self, tmp_path: Path, kills: int) -> None:
        draw, answered = random.Random(), 0
        for _ in range(kills):
            command = [sys.executable, "-m", "tests.conformance.log_writer", str(tmp_path), str(answered)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as writer:
                assert writer.stdout is not None
                for _ in range(draw.randint(1, 60)):
                    answered = int(writer.stdout.readline())
                writer.send_signal(signal.SIGKILL)
                answered = max([answered, *(int(line) for line in writer.stdout if line.endswith(b"\n"))])
            there = self.reopened(tmp_path)
            last = there.snapshot.index + len(there.entries)
            assert last >= answered
            for index, entry in enumerate(there.entries, there.snapshot.index + 1):
                assert entry == written(index)
            assert there.snapshot.state == (b"state of %d" % there.snapshot.index if there.snapshot.index else b"")
            answered = last


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


def written(index: int) -> LogEntry:
    """The entry that a writer puts at an index."""
    return LogEntry(1, random.Random(index).randbytes(index % 5000))


def write_until_killed(storage: SQLiteStorage) -> None:
    """Extend and compact a log, and print the index up to which it is written."""
    there = storage.load()[1]
    base, last = there.snapshot.index, there.snapshot.index + len(there.entries)
    draw = random.Random()
    while True:
        count = draw.randint(1, 5)
        storage.write([ExtendLog(last + 1, tuple(written(last + 1 + i) for i in range(count)))])
        last += count
        if last - base > 100:
            base = last - 10
            storage.write([RebaseLog(StateSnapshot(base, 1, b"state of %d" % base), True)])
        print(last, flush=True)  # noqa: T201


def _files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def _write(directory: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _tear(directory: Path, before: dict[str, bytes], after: dict[str, bytes], draw: random.Random) -> None:
    """Files in which each sector is of before or after, and those that have grown may have grown by less."""
    torn = {}
    for name in before | after:
        old, new = before.get(name, b""), after.get(name, b"")
        size = draw.randint(min(len(old), len(new)), max(len(old), len(new)))
        content = bytearray(old.ljust(size, b"\0")[:size])
        whole = draw.random()  # how much of it came to the disk
        for start in range(0, size, 512):
            if new[start : start + 512] != bytes(content[start : start + 512]) and draw.random() < whole:
                content[start : start + 512] = new[start : start + 512].ljust(min(512, size - start), b"\0")
        torn[name] = bytes(content)
    _write(directory, torn)
