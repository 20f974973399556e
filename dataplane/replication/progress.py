"""The progress of one peer: the part of the leader's log that the peer has, and the batch in flight to it.

One batch is in flight to a peer at a time. Commands that arrive meanwhile are sent in the next batch. So batches grow
with load and latency, and there is no window to tune.
"""

from __future__ import annotations

import math

from dataplane.replication.configuration import ReplicaId
from dataplane.replication.messages import AppendEntries, EntriesAppended, Install, Installing, Missing, StateSnapshot
from dataplane.replication.state import State


class PeerProgress:
    """The progress of one peer, a follower or a recruit. `match`: the last index that the peer is known to have, 0 for
    none.

    Invariant: the batch in flight, if there is one, has the entries from `_next` to `_target`. It is in flight until
    the peer acknowledges `_target` or reports that it lacks the entry before `_next`. After `retry_s` the leader sends
    again from the first entry that the peer may lack. A heartbeat is no batch.
    """

    __slots__ = (
        "_batch_s",
        "_next",
        "_on_its_way",
        "_peer",
        "_received",
        "_sent_s",
        "_snapshot",
        "_state",
        "_target",
        "match",
        "since",
    )

    def __init__(self, state: State, peer: ReplicaId, now: float) -> None:
        self._state = state
        self._peer = peer
        self.match = 0
        self.since = now
        """The time at which this leader began to send to the peer."""
        self._next = state.log.last + 1  # the first entry to send; the peer is assumed to have the earlier ones
        self._target = 0  # the peer's last index after the batch in flight
        self._on_its_way = False
        self._batch_s = self._sent_s = -math.inf
        self._snapshot: StateSnapshot | None = None  # sent to the peer in parts, of which it has `_received` bytes
        self._received = 0

    def appended(self, message: EntriesAppended) -> None:
        """Note that the peer has the log up to an index."""
        match = min(message.match, self._state.log.last)
        if match > self.match:
            self.match = match
            if self._snapshot is not None and match >= self._snapshot.index:
                self._snapshot = None
        if self.match >= self._target:
            self._on_its_way = False
            self._next = self.match + 1

    def missing(self, message: Missing) -> None:
        """Handle the answer that the peer lacks the entry before a batch. The next batch begins after the peer's
        committed entries, which are equal in all logs."""
        self._on_its_way = False
        self._next = min(max(message.committed, self.match), self._state.log.last) + 1

    def installing(self, message: Installing) -> None:
        """Note how many bytes of the snapshot the peer has received. The next part begins there."""
        if self._snapshot is not None and message.index == self._snapshot.index and message.sent_s == self._batch_s:
            self._received = min(message.received, len(self._snapshot.state))
            self._on_its_way = False

    def flow(self, now: float) -> None:
        """Send the next batch, if there is one and none is in flight."""
        if not self._on_its_way and self._next <= self._state.log.last:
            self.send_batch(now)

    def beat(self, now: float) -> None:
        """Repeat a batch that was not acknowledged for `retry_s`. If nothing was sent for a beat, send a heartbeat, or
        the snapshot to a peer that lacks it."""
        settings = self._state.settings
        if self._on_its_way and now - self._batch_s >= settings.retry_s:
            self._next = max(self._next, self.match + 1)
            self.send_batch(now)
        elif now - self._sent_s >= settings.beat_s:
            if self.match >= self._state.log.base:
                self._send(self.match, 0, now)
            elif not self._on_its_way:
                self.send_batch(now)

    def send_batch(self, now: float) -> None:
        """Send the next batch, or a heartbeat if there is none, and expect an acknowledgement."""
        self._batch_s = now
        self._on_its_way = True
        self._target = self._send(self._next - 1, self._state.settings.max_batch, now)

    def _send(self, previous: int, most: int, now: float) -> int:
        """Send at most `most` entries after `previous`, or the snapshot. Returns the last index sent."""
        state, log = self._state, self._state.log
        self._sent_s = now
        if previous < log.base:
            return self._send_part(now)
        entries = log.after(previous, most, state.settings.max_bytes)
        state.send(
            self._peer,
            AppendEntries(state.configuration, now, previous, log.epoch_at(previous), entries, state.committed),
        )
        return previous + len(entries)

    def _send_part(self, now: float) -> int:
        """Send the next part of a snapshot. Returns the index of the snapshot. Once the peer has received a part,
        the same snapshot is sent to its end, even if the log has a newer one."""
        state = self._state
        if self._snapshot is None or not self._received:
            self._snapshot, self._received = state.log.snapshot, 0
        snapshot, offset = self._snapshot, self._received
        part = snapshot.state[offset : offset + state.settings.max_bytes]
        size = len(snapshot.state)
        message = Install(state.configuration, now, snapshot.index, snapshot.epoch, size, offset, part)
        state.send(self._peer, message)
        return snapshot.index
