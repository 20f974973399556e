"""The log of one replica: a snapshot, the entries after it, and how much of them is on disk.

Invariant: two logs with an entry of the same epoch at the same index are equal up to it. An epoch has one leader,
which never changes a proposed entry, and an entry is accepted only after the one before it (`has`). So (index,
epoch) is enough to compare two logs, and `AppendEntries` carries no more.
"""

from __future__ import annotations

from collections import deque

import msgspec

from dataplane.errors import Corrupt
from dataplane.replication.messages import LogEntry, StateSnapshot


class Log:
    """The log of a replica. Indices begin at 1. `changes` lists the (ticket, operation) pairs of a durable log that are
    still to be passed to storage."""

    __slots__ = ("_entries", "_pending", "_ticket", "base", "changes", "durable", "last", "persisted", "snapshot")

    def __init__(self, stored: StoredLog, *, durable: bool) -> None:
        self.snapshot = stored.snapshot
        self._entries = stored.entries
        self.base = stored.snapshot.index
        """The last index that the snapshot includes."""
        self.last = self.base + len(stored.entries)
        """The index of the last entry, or `base`."""
        self.persisted = self.last
        """Entries up to here survive a crash, or count as surviving if the log is not durable."""
        self.durable = durable
        self.changes: list[tuple[int, Operation]] = []
        self._ticket = 0
        self._pending: deque[list[int]] = deque()  # [ticket, last index once it is stored]

    def epoch_at(self, index: int) -> int:
        """The epoch of the entry at an index from `base` to `last`."""
        return self.snapshot.epoch if index == self.base else self._entries[index - self.base - 1].epoch

    def command(self, index: int) -> bytes:
        return self._entries[index - self.base - 1].command

    def matches(self, index: int, epoch: int) -> bool:
        """Whether this log equals, up to `index`, any log that has an entry of `epoch` there."""
        if index < self.base:
            return True  # the snapshot has committed commands only, which are equal in all logs
        return index <= self.last and self.epoch_at(index) == epoch

    def after(self, index: int, most: int, most_bytes: int) -> tuple[LogEntry, ...]:
        """At most `most` entries after `index`, with commands of at most `most_bytes` in all. The first entry may be
        larger. `index` must be at least `base`."""
        start = index - self.base
        entries = self._entries[start : start + most]
        for count, entry in enumerate(entries):
            most_bytes -= len(entry.command)
            if most_bytes < 0 and count:
                return tuple(entries[:count])
        return tuple(entries)

    def append(self, entries: tuple[LogEntry, ...]) -> None:
        first = self.last + 1
        self._entries.extend(entries)
        self.last += len(entries)
        self._change(ExtendLog(first, entries))

    def merge(self, previous: int, entries: tuple[LogEntry, ...], committed: int) -> None:
        """Append the leader's entries after the index `previous`; up to it, both logs are equal. From the first
        difference on, this log's entries are removed first: they were proposed in an epoch that has ended, and never
        committed (PacificA, section 2.4).

        Raises Corrupt if an entry up to `committed` would be removed: a log or message was altered.
        """
        skip = max(0, self.base - previous)
        for i in range(skip, len(entries)):
            index = previous + 1 + i
            if index > self.last:
                self.append(entries[i:])
                return
            if self.epoch_at(index) != entries[i].epoch:
                if index <= committed:
                    raise Corrupt(f"the command at {index} was committed, and another is to take its place")
                self._truncate(index - 1)
                self.append(entries[i:])
                return

    def _truncate(self, last: int) -> None:
        del self._entries[last - self.base :]
        self.last = last
        self.persisted = min(self.persisted, last)
        for pending in self._pending:
            pending[1] = min(pending[1], last)
        self._change(TruncateLog(last))

    def compact(self, snapshot: StateSnapshot) -> None:
        """Replace the entries of committed commands by a snapshot."""
        del self._entries[: snapshot.index - self.base]
        self.snapshot, self.base = snapshot, snapshot.index
        self._change(RebaseLog(snapshot, True))

    def install(self, snapshot: StateSnapshot) -> None:
        """Replace the log up to the index of the leader's snapshot by the snapshot. Later entries are kept if the
        log's entry at that index is the snapshot's last one. A follower that has just restarted may have committed
        entries beyond the snapshot, and may become the leader before it gets them again (Raft's InstallSnapshot;
        Ongaro and Ousterhout, ATC 2014, section 7)."""
        if self.matches(snapshot.index, snapshot.epoch):
            self.compact(snapshot)
            return
        self._entries = []
        self.snapshot, self.base, self.last = snapshot, snapshot.index, snapshot.index
        self.persisted = 0
        for pending in self._pending:
            pending[1] = 0
        self._change(RebaseLog(snapshot, False))

    def stored(self, ticket: int) -> None:
        """Note that the operations up to this ticket are on disk."""
        while self._pending and self._pending[0][0] <= ticket:
            self.persisted = max(self.persisted, self._pending.popleft()[1])

    def _change(self, operation: Operation) -> None:
        if not self.durable:
            self.persisted = self.last
            return
        self._ticket += 1
        self._pending.append([self._ticket, self.last])
        self.changes.append((self._ticket, operation))


# The durable log: an ordered list of operations, and their result.
#
# A replica changes its log in memory and emits each change as an operation. `store.durable.log` writes them in order.
# After a crash it returns the result of a prefix of the operations, which includes all whose `write` returned. Of the
# last `ExtendLog` in that prefix, the result may contain only a prefix of the entries. A snapshot is either complete or
# absent. The replica relies on nothing else. SQLite's write-ahead log provides this with a transaction for each batch.

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
