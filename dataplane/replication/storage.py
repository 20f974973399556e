"""The durable log: an ordered list of operations, and their result.

A replica changes its log in memory and emits each change as an operation. Storage writes them in order; after a
crash it returns the result of some first part of them, at least what was written. It may return more, and of an
`Extend` any first part of its entries. A snapshot is there entirely or not at all. This is what SQLite's write-ahead
log provides with a transaction for each batch, and all that the replica relies on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from dataplane.replication.configuration import ReplicaId
from dataplane.replication.messages import Entry, Snapshot

EMPTY = Snapshot(0, 0, b"")


class Extend(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Append entries, of which the first has the index `first`."""

    first: int
    entries: tuple[Entry, ...]


class Truncate(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Only entries up to `last` remain."""

    last: int


class Rebase(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The snapshot replaces all entries up to its index, and those after it unless they are kept."""

    snapshot: Snapshot
    keep: bool


Operation = Extend | Truncate | Rebase


class Stored(msgspec.Struct):
    """A log, as the result of operations."""

    snapshot: Snapshot = EMPTY
    entries: list[Entry] = []

    def apply(self, operation: Operation) -> None:
        base = self.snapshot.index
        if isinstance(operation, Extend):
            self.entries[operation.first - base - 1 :] = operation.entries
        elif isinstance(operation, Truncate):
            del self.entries[operation.last - base :]
        else:
            kept = self.entries[operation.snapshot.index - base :] if operation.keep else []
            self.snapshot, self.entries = operation.snapshot, kept


class Storage(ABC):
    """Where the log of one replica is stored. Called by one thread at a time."""

    durable = True
    """Whether it outlives the process."""

    @abstractmethod
    def load(self) -> tuple[ReplicaId, Stored]:
        """The replica that the log is of, and the log. Raises Corrupt for a wrong byte before the torn tail."""

    @abstractmethod
    def write(self, operations: Sequence[Operation]) -> None:
        """Write operations after the earlier ones. Returns once they will survive a crash. Raises Backpressure if
        there is no room; then none is written."""


class MemoryStorage(Storage):
    """Lives as long as the process: for partitions that are not durable, and for tests."""

    durable = False

    def __init__(self, replica: ReplicaId) -> None:
        self._replica = replica
        self._stored = Stored()

    def load(self) -> tuple[ReplicaId, Stored]:
        return self._replica, Stored(self._stored.snapshot, self._stored.entries.copy())

    def write(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            self._stored.apply(operation)
