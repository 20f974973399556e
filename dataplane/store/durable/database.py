"""The SQLite file of a data directory: one connection, one transaction at a time, typed errors.

Invariants:

- a commit returns once it is on disk (WAL, `synchronous=FULL`);
- a transaction is stored whole or not at all. If the disk is full it is rolled back, and the next one may succeed;
- after any other failure of the disk nothing more is written: after a failed sync the contents of the disk are unknown
  until the file is opened again.

The directory's lock excludes other processes, so SQLite needs no file locks and no memory shared between processes. Any
thread may use `Database`; its calls wait for each other.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec
import xxhash

from dataplane.errors import Backpressure, Corrupt, DataplaneError, DirectoryUnusable, LimitExceeded
from dataplane.threads import Pool

Args = ParamSpec("Args")
T = TypeVar("T")

Work = Callable[[sqlite3.Connection], None]
"""A function to run in a transaction. It runs again if the transaction was rolled back because the disk was full."""

APPLICATION = 0x64706C6E
"""SQLite's `application_id`: dpln."""
FORMAT = 5
"""SQLite's `user_version`: the version of the tables."""

_SCHEMA = """
CREATE TABLE identity (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE logs (
    id INTEGER PRIMARY KEY, name TEXT UNIQUE, node TEXT, incarnation INTEGER, base INTEGER, last INTEGER, sum INTEGER
);
CREATE TABLE snapshots (log INTEGER PRIMARY KEY, epoch INTEGER, state BLOB, sum INTEGER);
CREATE TABLE notes (kind TEXT, name TEXT, value BLOB, sum INTEGER, PRIMARY KEY (kind, name)) WITHOUT ROWID;
CREATE TABLE entries (place INTEGER PRIMARY KEY, epoch INTEGER, command BLOB, sum INTEGER);
CREATE TABLE shards (
    number INTEGER PRIMARY KEY, file INTEGER, start INTEGER, stored INTEGER, size INTEGER, rows INTEGER,
    columns INTEGER, layout BLOB, holder TEXT, sums BLOB, sum INTEGER
);
"""


class Database:
    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises DirectoryUnusable if the file is another program's or version's, or if the
        system refuses; Backpressure if the disk is full; Corrupt if SQLite finds changed bytes."""
        self.path = path
        self._lock = threading.Lock()
        self._failure: DataplaneError | None = None
        check_header(path)
        with translated(path):
            self._sql = sqlite3.connect(path, isolation_level=None, check_same_thread=False, cached_statements=64)
        try:
            with translated(path):
                self._open(path)
        except BaseException:
            self._sql.close()
            raise

    def _open(self, path: Path) -> None:
        sql = self._sql
        sql.execute("PRAGMA locking_mode = EXCLUSIVE")
        found = sql.execute("PRAGMA application_id").fetchone()[0], sql.execute("PRAGMA user_version").fetchone()[0]
        fresh = found == (0, 0) and not sql.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if not fresh:
            check_format(path, *found)
        if sql.execute("PRAGMA journal_mode = WAL").fetchone()[0] != "wal":
            raise DirectoryUnusable(f"{path} can not have a write-ahead log", path=str(path), reason="file system")
        sql.execute("PRAGMA synchronous = FULL")
        sql.execute("PRAGMA cache_size = -16384")  # KiB
        if fresh:
            sql.executescript(
                f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA application_id = {APPLICATION}; "
                f"PRAGMA user_version = {FORMAT}; COMMIT"
            )
            sql.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # from now on its header names its owner

    def commit(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a transaction. Returns its result once the transaction is on disk. Raises Backpressure if the
        disk is full, LimitExceeded if a value is too large, DirectoryUnusable or Corrupt after any other failure, then
        also at each later call. After an error nothing of the transaction is stored."""
        with self._lock:
            if self._failure is not None:
                raise type(self._failure)(str(self._failure), **self._failure.fields)
            try:
                with translated(self.path):
                    self._sql.execute("BEGIN IMMEDIATE")
                    result = work(self._sql)
                    self._sql.execute("COMMIT")
            except BaseException as error:
                if self._sql.in_transaction:
                    with translated(self.path):
                        self._sql.execute("ROLLBACK")
                if isinstance(error, DataplaneError) and not isinstance(error, Backpressure | LimitExceeded):
                    self._failure = type(error)(str(error), **error.fields)
                raise
            return result

    def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return the result of `work`. Raises Corrupt for changed bytes, DirectoryUnusable if the system refuses."""
        with self._lock, translated(self.path):
            return work(self._sql)

    def close(self) -> None:
        """Close the file. Idempotent."""
        with self._lock:
            self._failure = DirectoryUnusable(f"{self.path} was closed", path=str(self.path), reason="closed")
            self._sql.close()


_HEADER = struct.Struct(">16s44xI4xI28x")  # https://www.sqlite.org/fileformat2.html#the_database_header
_MAGIC = b"SQLite format 3\0"


def check_header(path: Path) -> None:
    """Raises DirectoryUnusable for a file that must not be opened, because even closing it would write to it."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER.size)
    except FileNotFoundError:
        return
    except OSError as error:
        reason, remedy = _REFUSED[sqlite3.SQLITE_CANTOPEN]
        raise DirectoryUnusable(f"{path}: {error.strerror}; {remedy}", path=str(path), reason=reason) from error
    if head:
        magic, version, application = _HEADER.unpack(head.ljust(_HEADER.size, b"\0"))
        if magic != _MAGIC or (application, version) != (0, 0):
            check_format(path, application if magic == _MAGIC else 0, version)


def check_format(path: Path, application: int, version: int) -> None:
    """Raises DirectoryUnusable for a file that belongs to another program, or has the format of another version."""
    if application != APPLICATION:
        raise DirectoryUnusable(
            f"{path} is another program's; choose another directory", path=str(path), reason="another program's"
        )
    if version != FORMAT:
        raise DirectoryUnusable(
            f"{path} is of format {version}, and this version writes {FORMAT}: run the version that wrote it, let its "
            "streams drain, and choose an empty directory for this one",
            path=str(path),
            reason="another version's",
        )


_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_NOMEM)
_REFUSED = {
    sqlite3.SQLITE_READONLY: ("read-only", "mount it to be written, or choose another directory"),
    sqlite3.SQLITE_PERM: ("no permission", "let the node's user write there, or choose another directory"),
    sqlite3.SQLITE_CANTOPEN: ("no permission", "let the node's user write there, or choose another directory"),
    sqlite3.SQLITE_IOERR: ("failed", "see what the system says of the disk, and start the node again"),
    sqlite3.SQLITE_BUSY: ("in use", "stop who uses it, or choose another directory"),
    sqlite3.SQLITE_LOCKED: ("in use", "stop who uses it, or choose another directory"),
}


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """A context that turns errors of SQLite and of the system into those of this package."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
        if code in _FULL:
            raise Backpressure(f"{path}: {error}", spill_error=f"writing {path} failed: {error}") from error
        if code == sqlite3.SQLITE_TOOBIG:
            raise LimitExceeded(f"{path}: {error}", what="bytes of one value") from error
        if code == sqlite3.SQLITE_IOERR and _read_only(path):
            code = sqlite3.SQLITE_READONLY
        if code in _REFUSED:
            reason, remedy = _REFUSED[code]
            raise DirectoryUnusable(f"{path}: {error}; {remedy}", path=str(path), reason=reason) from error
        raise Corrupt(f"{path} is not as it was written: {error}", path=str(path)) from error


def _read_only(path: Path) -> bool:
    """Whether the file system is mounted read-only, which SQLite does not always report."""
    try:
        return bool(os.statvfs(path.parent).f_flag & os.ST_RDONLY)
    except OSError:
        return False


_encode = msgspec.msgpack.Encoder().encode


def checksum(*values: object) -> int:
    """The checksum of the values of a row, in SQLite's form: signed."""
    return xxhash.xxh3_64_intdigest(_encode(values)) - (1 << 63)


CLOSE_S = 1.5
RETRY_S = 0.5
LAZY_S = 0.2


class Journal:
    """Commits writes to a data directory, in one thread. Writes that arrive during a commit are part of the next one.
    Used from one event loop.

    A sync of the disk costs the same for one write as for a thousand, so a node has one transaction at a time, for all
    of its partitions and its index of shards. Writes are committed in the order in which they were given.

    Invariants: an answered write is on disk, with all writes before it. While the disk is full, no write is answered,
    the commit is repeated, and `refusal` has the reason. After DirectoryUnusable or Corrupt, this write and all later
    ones fail.
    """

    def __init__(self, database: Database) -> None:
        """Raises OSError if the system starts no thread."""
        self._database = database
        self._thread = Pool(1, "dataplane-commit", storage=True)
        self._waiting: list[tuple[Work, asyncio.Future[None]]] = []
        self._under_way: list[tuple[Work, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self.refusal: Backpressure | None = None
        """The reason why nothing is committed now, if the disk is full; else None."""
        self.commits = 0

    def write(self, work: Work, *, lazily: bool = False) -> asyncio.Future[None]:
        """Run `work` in the next transaction, in another thread. Returns a future that is done once the transaction is
        on disk. `work` runs again if the transaction was rolled back. `lazily`: commit with the next other write, or
        after `LAZY_S`.

        The future raises DirectoryUnusable, Corrupt or LimitExceeded. Cancelling it undoes nothing.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.append((work, future))
        if not lazily:
            self._begin()
        elif self._timer is None and not self._under_way:
            self._timer = loop.call_later(LAZY_S, self._begin)
        return future

    def run(self, work: Callable[Args, T], *args: Args.args, **kwargs: Args.kwargs) -> asyncio.Future[T]:
        """Run `work` in the thread of the commits, after the commit in progress and before waiting writes. Returns a
        future with the result or error of `work`."""
        return asyncio.wrap_future(self._thread.submit(work, *args, **kwargs))

    def _begin(self) -> None:
        if self._under_way or self._closed or not self._waiting:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._under_way, self._waiting = self._waiting, []
        self.run(self._commit, [work for work, _ in self._under_way]).add_done_callback(self._ended)

    def _commit(self, works: Sequence[Work]) -> None:
        def all_of_them(sql: sqlite3.Connection) -> None:
            for work in works:
                work(sql)

        self._database.commit(all_of_them)

    def _ended(self, done: asyncio.Future[None]) -> None:
        under_way, self._under_way = self._under_way, []
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if isinstance(error, Backpressure) and not self._closed:
            self.refusal = error
            self._waiting[:0] = under_way
            self._timer = asyncio.get_running_loop().call_later(RETRY_S, self._begin)
            return
        self.refusal = None
        self.commits += error is None
        for _, future in under_way:
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            elif isinstance(error, asyncio.CancelledError):
                future.cancel()
            else:
                future.set_exception(error)
        self._begin()

    def close(self) -> None:
        """Stop. Cancels writes that have not begun, and waits at most `CLOSE_S` for those in progress. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for _, future in self._waiting:
            future.cancel()
        self._waiting.clear()
        self._thread.shutdown(cancel_futures=True, patience_s=CLOSE_S)


class Notes:
    """The notes of one kind: small values by name in a data directory, for a node that is started again.

    Invariants: changes are committed in the order of the calls, together with the journal's other writes; a changed
    value is Corrupt. Used from the journal's loop.
    """

    def __init__(self, database: Database, journal: Journal, kind: str) -> None:
        self._database = database
        self._journal = journal
        self.kind = kind

    def load(self) -> dict[str, bytes]:
        """Return all notes of the kind. Raises Corrupt if one was changed."""
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
        """Set the values of these names; None deletes a note. Returns a future as `Journal.write` does."""
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
