"""The durable log: an ordered list of operations, and their result.

A replica changes its log in memory and emits each change as an operation. Storage writes them in order. After a crash
it returns the result of a prefix of the operations, which includes all whose `write` returned. Of the last `ExtendLog`
in that prefix, the result may contain only a prefix of the entries. A snapshot is either complete or absent. The
replica relies on nothing else. SQLite's write-ahead log provides this with a transaction for each batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from dataplane.replication.configuration import ReplicaId
from dataplane.replication.messages import LogEntry, StateSnapshot

EMPTY = StateSnapshot(0, 0, b"")


class ExtendLog(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Append entries from the index `first` on."""

    first: int
    entries: tuple[LogEntry, ...]


class TruncateLog(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Remove the entries after the index `last`."""

    last: int


class RebaseLog(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Replace all entries up to the index of a snapshot by the snapshot. Unless `keep`, remove those after it too."""

    snapshot: StateSnapshot
    keep: bool


Operation = ExtendLog | TruncateLog | RebaseLog


class StoredLog(msgspec.Struct):
    """A log, as the result of operations."""

    snapshot: StateSnapshot = EMPTY
    entries: list[LogEntry] = []

    def apply(self, operation: Operation) -> None:
        base = self.snapshot.index
        if isinstance(operation, ExtendLog):
            self.entries[operation.first - base - 1 :] = operation.entries
        elif isinstance(operation, TruncateLog):
            del self.entries[operation.last - base :]
        else:
            kept = self.entries[operation.snapshot.index - base :] if operation.keep else []
            self.snapshot, self.entries = operation.snapshot, kept


class Storage(ABC):
    """The storage of one replica's log. Called by one thread at a time."""

    durable = True
    """Whether it outlives the process."""

    @abstractmethod
    def load(self) -> tuple[ReplicaId, StoredLog]:
        """The replica that owns the log, and the log. A torn last write is ignored; any other wrong byte raises
        Corrupt."""

    @abstractmethod
    def write(self, operations: Sequence[Operation]) -> None:
        """Write operations after the earlier ones. Returns once they survive a crash. Raises Backpressure if there is
        no room; then none of them is written."""


class MemoryStorage(Storage):
    """A log that ends with the process: for partitions that are not durable, and for tests."""

    durable = False

    def __init__(self, replica: ReplicaId) -> None:
        self._replica = replica
        self._stored = StoredLog()

    def load(self) -> tuple[ReplicaId, StoredLog]:
        return self._replica, StoredLog(self._stored.snapshot, self._stored.entries.copy())

    def write(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            self._stored.apply(operation)
