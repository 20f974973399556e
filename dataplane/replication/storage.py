"""The durable log: operations in order, and what they make.

A replica changes its log in memory and says each change as an operation. Storage writes them in that order; after a
crash it gives back what some first part of them made, never less than was synced. It may give back more, and of an
`Extend` any first part of its entries. A snapshot is there whole or not at all. That is what SQLite's write-ahead log
gives, with a transaction for each batch, and all that the replica relies on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import msgspec

from dataplane.replication.configuration import ReplicaId
from dataplane.replication.messages import Entry, Snapshot

EMPTY = Snapshot(0, 0, b"")


class Extend(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Entries after the last, of which the first has the index `first`."""

    first: int
    entries: tuple[Entry, ...]


class Truncate(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Only entries up to `last` remain."""

    last: int


class Rebase(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The snapshot takes the place of all entries up to its index, and of those after it unless they are kept."""

    snapshot: Snapshot
    keep: bool


Operation = Extend | Truncate | Rebase


class Stored(msgspec.Struct):
    """A log as operations have made it."""

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
    """Where the log of one replica lies. Called by one thread at a time. An error of `write` is of all that was written
    since the last sync, as one transaction may hold it."""

    durable = True
    """Whether it outlives the process."""

    @abstractmethod
    def load(self) -> tuple[ReplicaId, Stored]:
        """The replica that the log is of, and the log. Raises Corrupt for a wrong byte before the torn tail."""

    @abstractmethod
    def write(self, operations: Iterable[Operation]) -> None:
        """Write operations after those before. Raises Backpressure where there is no room; then none is written."""

    @abstractmethod
    def sync(self) -> None:
        """Return once all that was written will be there after a crash. Raises Backpressure as `write`: then nothing
        is there of what was written since the last sync, and it is to be written again."""


class MemoryStorage(Storage):
    """Lives as long as the process: for partitions that are not durable, and for tests."""

    durable = False

    def __init__(self, replica: ReplicaId) -> None:
        self._replica = replica
        self._stored = Stored()

    def load(self) -> tuple[ReplicaId, Stored]:
        return self._replica, Stored(self._stored.snapshot, self._stored.entries.copy())

    def write(self, operations: Iterable[Operation]) -> None:
        for operation in operations:
            self._stored.apply(operation)

    def sync(self) -> None:
        return
