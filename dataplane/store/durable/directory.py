"""A node's data directory: its identity, locked by the one process that uses it.

    DIR/node.sqlite     identity, logs of partitions, index of durable shards (`database`)
    DIR/shards/         the files of durable shards (`shards`)

The directory determines the identity of a node: a node that is started again on it is the same member with the same
logs. The lock is a flock on the directory itself. The kernel releases it however the process ends.

Invariants: nothing is written to a directory of another process, program, version or cluster, nor to a directory with
other files only.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from dataplane.batch.locations import MOST_SHARDS
from dataplane.errors import Backpressure, Corrupt, DirectoryUnusable
from dataplane.store.durable.database import Database, checksum

DATABASE, SHARDS = "node.sqlite", "shards"
NUMBERS = 1 << 24
"""The count of shard numbers that a node reserves at each start, and again when it has used half of them."""

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_ODD = ("lost+found",)  # made by the file system in its root


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """The identity of a node. `incarnation`: that of its logs; a new directory has another. `starts`: how often the
    directory was opened. `numbers`: the first shard number that is not reserved."""

    node: bytes
    incarnation: int
    cluster: str
    starts: int
    numbers: int


class DataDirectory:
    """An open and locked data directory. `database` and `shards`, a descriptor of the folder of files, are closed with
    it. `first`: the first shard number of this start."""

    def __init__(self, path: Path, cluster: str = "") -> None:
        """Open or create the directory, for this process only. `cluster`: the name of the node's cluster; empty: none.
        Raises DirectoryUnusable if the node cannot use it, Corrupt for changed bytes, Backpressure for a full disk."""
        self.path = path
        with ExitStack() as undo:
            self._lock = self._locked(path)
            undo.callback(os.close, self._lock)
            self._check_content(path)
            self.database = Database(path / DATABASE)
            undo.callback(self.database.close)
            found = self._identity(cluster)
            self.first = found.numbers
            if self.first + NUMBERS > MOST_SHARDS:
                raise DirectoryUnusable(
                    f"{path} was opened {found.starts:,} times, and has no numbers left for new shards: start the node"
                    " with an empty --data-dir",
                    path=str(path),
                    reason="used up",
                )
            self.identity = self._keep(replace(found, starts=found.starts + 1, numbers=self.first + NUMBERS))
            with _system(path / SHARDS):
                (path / SHARDS).mkdir(mode=0o700, exist_ok=True)
                self.shards = os.open(SHARDS, _OPEN | os.O_NOFOLLOW, dir_fd=self._lock)
                undo.callback(os.close, self.shards)
            with _system(path):
                os.fsync(self._lock)
            self._undo = undo.pop_all()

    def _locked(self, path: Path) -> int:
        """The directory, open and locked. Raises DirectoryUnusable, Backpressure."""
        with _system(path):
            missing = [each for each in (path, *path.parents) if not each.exists()]
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            for each in missing:
                _sync(each.parent)
            descriptor = os.open(path, _OPEN)
        try:
            with _system(path):
                owner = os.fstat(descriptor).st_uid
                if owner != os.geteuid():
                    raise DirectoryUnusable(
                        f"{path} is user {owner}'s: choose a directory of the node's own user",
                        path=str(path),
                        reason="another user's",
                    )
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _check_content(self, path: Path) -> None:
        """Raises DirectoryUnusable if the directory is not empty and is no data directory."""
        with _system(path):
            names = set(os.listdir(path)) - set(_ODD)
            if names - {SHARDS} and DATABASE not in names:
                raise DirectoryUnusable(
                    f"{path} has {min(names)!r} in it and is no data directory: choose an empty one",
                    path=str(path),
                    reason="another program's",
                )
            if DATABASE in names and not stat.S_ISREG(os.stat(path / DATABASE, follow_symlinks=False).st_mode):
                raise DirectoryUnusable(
                    f"{path / DATABASE} is no file: choose an empty directory",
                    path=str(path),
                    reason="another program's",
                )

    def _identity(self, cluster: str) -> Identity:
        found = self.database.read(_read)
        if found is None:
            return Identity(secrets.token_bytes(8), secrets.randbits(31), cluster, 0, 1)
        if found.cluster != cluster:
            named = repr(found.cluster) if found.cluster else "no cluster: it was of one host alone"
            raise DirectoryUnusable(
                f"{self.path} is of a node of {named}, and this one is to be of {cluster or 'none'!r}: join that one,"
                " or choose an empty directory",
                path=str(self.path),
                reason="another cluster's",
            )
        return found

    def _keep(self, identity: Identity) -> Identity:
        def write(sql: sqlite3.Connection) -> None:
            values = (msgspec.msgpack.encode(identity), checksum(identity))
            sql.execute("INSERT OR REPLACE INTO identity VALUES ('node', ?), ('sum', ?)", values)

        self.database.commit(write)
        return identity

    def more_numbers(self, sql: sqlite3.Connection, last: int) -> None:
        """Reserve shard numbers below `last`, in a transaction that has to commit before they are used."""
        kept = replace(self.identity, numbers=last)
        sql.execute("UPDATE identity SET value = ? WHERE name = 'node'", (msgspec.msgpack.encode(kept),))
        sql.execute("UPDATE identity SET value = ? WHERE name = 'sum'", (checksum(kept),))
        self.identity = kept

    def close(self) -> None:
        """Close the directory and release its lock. Idempotent."""
        self._undo.close()


def _sync(folder: Path) -> None:
    """Return once the names in the folder are on disk."""
    descriptor = os.open(folder, _OPEN)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(sql: sqlite3.Connection) -> Identity | None:
    rows: dict[str, Any] = dict(sql.execute("SELECT name, value FROM identity").fetchall())
    if not rows:
        return None
    try:
        found = msgspec.msgpack.decode(rows["node"], type=Identity)
    except (KeyError, TypeError, msgspec.MsgspecError):
        raise Corrupt("the node's identity is not as it was written") from None
    if checksum(found) != rows.get("sum"):
        raise Corrupt("the node's identity is not as it was written")
    return found


@contextmanager
def _system(path: Path) -> Iterator[None]:
    """A context that turns errors of the system about `path` into those of this package."""
    try:
        yield
    except OSError as error:
        raise refused(path, error) from error


_REASONS = {
    errno.EWOULDBLOCK: ("in use", "another node runs on it: stop that one, or choose another directory"),
    errno.EROFS: ("read-only", "mount it to be written, or choose another directory"),
    errno.EACCES: ("no permission", "let the node's user write there, or choose another directory"),
    errno.EPERM: ("no permission", "let the node's user write there, or choose another directory"),
    errno.ENOTDIR: ("another program's", "it is no directory: choose another"),
    errno.EEXIST: ("another program's", "it is no directory: choose another"),
}


def refused(path: Path, error: OSError) -> DirectoryUnusable | Backpressure:
    """Return the error for a refused operation there: Backpressure if the disk is full, else DirectoryUnusable."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Backpressure(f"{path}: {error.strerror}", spill_error=f"writing {path} failed: {error.strerror}")
    reason, remedy = _REASONS.get(error.errno or 0, ("failed", "see what the system says of the disk"))
    return DirectoryUnusable(f"{path} can not be used: {error.strerror}; {remedy}", path=str(path), reason=reason)
