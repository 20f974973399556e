"""A replica that does not lead: it accepts entries of the leader of its epoch, and takes over if the leader falls
silent.

A replica outside the configuration has this role too: a recruit that catches up, or a dropped follower that may be
recruited again. It acknowledges like a follower but cannot take over, since no configuration names it.
"""

from __future__ import annotations

import math

from dataplane.errors import Corrupt
from dataplane.replication.configuration import Configuration
from dataplane.replication.messages import AppendEntries, EntriesAppended, Install, Installing, Missing, StateSnapshot
from dataplane.replication.state import State

_NONE: dict[int, int] = {}


class Follower:
    """The role of a follower, over a replica's state."""

    __slots__ = ("_acknowledged", "_matched", "_parts", "_sent_s", "_snapshot", "_state")

    def __init__(self, state: State) -> None:
        self._state = state
        self.begin()

    def begin(self) -> None:
        """Begin an epoch. Nothing is known yet of its leader's log."""
        self._matched = 0  # the index up to which this log is known to equal the leader's
        self._acknowledged = 0
        self._sent_s = -math.inf  # `sent_s` of the newest message of this leader
        self._snapshot = 0, 0  # (index, epoch) of the snapshot that is being received
        self._parts = bytearray()

    def append(self, message: AppendEntries, now: float) -> None:
        """Append the leader's entries after the common prefix, and acknowledge those on disk (section 2.1). Raises
        Corrupt if they contradict a committed entry."""
        self._heard(message, now)
        state, log = self._state, self._state.log
        if not log.matches(message.previous, message.previous_epoch):
            missing = Missing(message.configuration.epoch, message.sent_s, message.previous, state.committed)
            state.send(message.configuration.leader, missing)
            return
        if message.entries:
            log.merge(message.previous, message.entries, state.committed)
        self._matched = max(self._matched, message.previous + len(message.entries))
        state.commit(min(message.committed, self._matched), _NONE)
        self._acknowledge()

    def install(self, message: Install, now: float) -> None:
        """Accept a part of the leader's snapshot. Install the snapshot once it is complete, unless this replica
        has committed the snapshot's index meanwhile. Raises Corrupt for an invalid part."""
        self._heard(message, now)
        state = self._state
        if message.index > state.committed:
            if self._snapshot != (message.index, message.epoch):
                self._snapshot, self._parts = (message.index, message.epoch), bytearray()
            if message.offset == len(self._parts):
                self._parts += message.part
            if len(self._parts) > message.size:
                raise Corrupt(f"a snapshot of {message.size} bytes came with {len(self._parts)}")
            if len(self._parts) < message.size:
                epoch = message.configuration.epoch
                received = Installing(epoch, message.sent_s, message.index, len(self._parts))
                state.send(message.configuration.leader, received)
                return
            state.install(StateSnapshot(message.index, message.epoch, bytes(self._parts)))
        self._parts = bytearray()
        self._snapshot = 0, 0
        self._matched = max(self._matched, message.index)
        self._acknowledge()

    def stored(self) -> None:
        """Acknowledge the entries that are on disk now."""
        if min(self._matched, self._state.log.persisted) > self._acknowledged:
            self._acknowledge()

    def wanted(self, now: float) -> Configuration | None:
        """The configuration to request if this replica should become the leader, else None. A follower should if the
        leader has ended, or was silent for `grace_s` and this process had no recent pause. A replica that its
        configuration names as leader should too: an earlier process of it began the epoch."""
        state = self._state
        configuration = state.configuration
        if configuration.leader == state.me:
            return configuration.restarted()  # an earlier process of this replica began this epoch
        if state.me not in configuration.followers or not state.promise.silent(configuration.leader, now):
            return None
        if not state.suspend_guard.judges(now) and not state.promise.ended(configuration.leader):
            return None
        return configuration.deposed_by(state.me)

    def deadline(self, now: float) -> float:
        """The time of the next `tick`, by this replica's clock. Infinite outside the configuration."""
        state = self._state
        configuration = state.configuration
        if configuration.leader == state.me:
            return now + state.settings.retry_s
        if state.me in configuration.followers:
            until, beat = state.promise.until(configuration.leader), now + state.settings.beat_s
            return until if now < until < beat else beat
        return math.inf

    def _heard(self, message: AppendEntries | Install, now: float) -> None:
        self._state.promise.hear(self._state.configuration.leader, now)
        self._sent_s = max(self._sent_s, message.sent_s)

    def _acknowledge(self) -> None:
        state = self._state
        self._acknowledged = min(self._matched, state.log.persisted)
        configuration = state.configuration
        state.send(configuration.leader, EntriesAppended(configuration.epoch, self._sent_s, self._acknowledged))
