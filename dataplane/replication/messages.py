"""The messages between replicas of a partition.

A leader sends `AppendEntries` and `Install`. The others answer them, except that a leader also sends `Outdated` to a
dropped replica. Each message names its epoch. A leader's message of an older epoch is answered by `Outdated` with the
newer configuration. An answer of another epoch than the leader's is ignored.

Indices of a log begin at 1. `sent_s` is by the leader's clock and is returned unchanged: a follower's
acknowledgement renews the leader's lease from the time at which the message was *sent* (PacificA, section 2.3).
"""

from __future__ import annotations

import msgspec

from dataplane.replication.configuration import Configuration


class LogEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A command of the log, with the epoch in which it was first proposed. An empty command marks the beginning of a
    leader's epoch."""

    epoch: int
    command: bytes


class StateSnapshot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The state after the commands up to `index`. The last of them was proposed in `epoch`."""

    index: int
    epoch: int
    state: bytes


class AppendEntries(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The entries after index `previous`, where the leader's log has an entry of `previous_epoch`. Without entries, a
    heartbeat."""

    configuration: Configuration
    sent_s: float
    previous: int
    previous_epoch: int
    entries: tuple[LogEntry, ...]
    committed: int


class Install(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A part of a snapshot, for a replica whose log ends before the leader's first entry: the bytes of the state from
    `offset` on, of `size` in all."""

    configuration: Configuration
    sent_s: float
    index: int
    epoch: int
    size: int
    offset: int
    part: bytes


class EntriesAppended(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The follower's log equals the leader's up to `match`; if the partition is durable, also after a crash."""

    epoch: int
    sent_s: float
    match: int


class Missing(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The follower lacks the entry at `previous` of the message that was sent at `sent_s`. Up to `committed`, its own
    committed index, its log equals the leader's."""

    epoch: int
    sent_s: float
    previous: int
    committed: int


class Outdated(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """A newer configuration, for the sender of a message of an epoch that has ended, or for a dropped replica."""

    configuration: Configuration


class Installing(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """After receiving the part sent at `sent_s`, the follower has the first `received` bytes of the snapshot at
    `index`."""

    epoch: int
    sent_s: float
    index: int
    received: int


Message = AppendEntries | Install | EntriesAppended | Missing | Outdated | Installing
