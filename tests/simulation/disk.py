"""A disk that loses at a crash what was not synced: all of it, or but for a first part, of which the last may be
torn."""

from __future__ import annotations

from random import Random

from dataplane.replication.log import ExtendLog, Operation, StoredLog, TruncateLog


class Disk:
    """The log of one replica. `stored` is what would be there after the worst crash."""

    __slots__ = ("stored", "unsynced")

    def __init__(self) -> None:
        self.stored = StoredLog()
        self.unsynced: list[tuple[int, Operation]] = []

    def write(self, ticket: int, operation: Operation) -> None:
        self.unsynced.append((ticket, operation))

    def sync(self, count: int) -> int:
        """The first so many writes are there to stay; the ticket of the last."""
        synced, self.unsynced = self.unsynced[:count], self.unsynced[count:]
        for _, operation in synced:
            apply(self.stored, operation)
        return synced[-1][0]

    def crash(self, rng: Random) -> None:
        survived = rng.randint(0, len(self.unsynced))
        for _, operation in self.unsynced[:survived]:
            apply(self.stored, operation)
        if survived < len(self.unsynced) and rng.random() < 0.5:
            torn = self.unsynced[survived][1]
            if isinstance(torn, ExtendLog):  # any other is there whole or not at all
                whole = rng.randrange(len(torn.entries))
                apply(self.stored, ExtendLog(torn.first, torn.entries[:whole]))
        self.unsynced.clear()

    def load(self) -> StoredLog:
        return StoredLog(self.stored.snapshot, self.stored.entries.copy())


def apply(log: StoredLog, operation: Operation) -> None:
    """The effect of an operation on a log."""
    base = log.snapshot.index
    if isinstance(operation, ExtendLog):
        log.entries[operation.first - base - 1 :] = operation.entries
    elif isinstance(operation, TruncateLog):
        del log.entries[operation.last - base :]
    else:
        kept = log.entries[operation.snapshot.index - base :] if operation.keep else []
        log.snapshot, log.entries = operation.snapshot, kept
