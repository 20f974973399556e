"""A partition of a stream as a state machine: `leader` turns requests into commands, `replicated` applies commands
to rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dataplane.errors import OutcomeUnknown, ProtocolMismatch
from dataplane.replication.machine import Decision, StateMachine
from dataplane.stream import commands as c
from dataplane.stream import requests as r
from dataplane.stream.leader import StreamLeader
from dataplane.stream.replicated import ColumnStore
from dataplane.stream.row_choice import needed
from dataplane.stream.sampler import Fifo
from dataplane.stream.settings import StreamSettings

_TICK_REQUEST = r.encode_request(r.Tick())


class StreamMachine(StreamLeader, StateMachine):
    """A partition of a stream; see the module."""

    def __init__(self, name: str, settings: StreamSettings | None = None, mark: str = "") -> None:
        """Without settings, the first request is `Open`."""
        super().__init__(name, settings, mark)

    def forget(self) -> None:
        self._forget()
        self.leased.forget_leases(1, leading=False)

    def deadline(self, now: float) -> float:
        """The time of the leader's clock at which it needs a `Tick`; `now` if it needs one at once."""
        leased = self.leased
        if self._term < 0:
            return now
        due = leased.leases.next_end()
        when = float("inf") if due is None else due - self._ahead_s
        return now if leased.commands or leased.loose or leased.replaced.unread(leased.leases) else when

    def tick(self) -> bytes:
        return _TICK_REQUEST

    @property
    def version(self) -> int:
        return self.leased.changes

    def serves(self, request: bytes, in_vain: int) -> bool:
        return self.serves_decoded(r.decode_request(request), in_vain)

    def serves_decoded(self, asked: r.StreamRequest, in_vain: int) -> bool:
        """As `serves`, for a decoded request."""
        leased = self.leased
        if isinstance(asked, r.Append | r.Admit):
            return leased.closed or not leased.admission.full(self.entry_of(asked))
        if not isinstance(asked, r.Consume):
            return in_vain != leased.changes
        task = leased.settings.task(asked.task)
        if leased.drained(task) or leased.leases.waiting(task, asked.who) is not None:
            return True
        least, columns = asked.min_rows if isinstance(asked.sampler, Fifo) else 1, needed(asked.columns, asked.sampler)
        if leased.closed:
            least = min(least, leased.partition.progress.is_left(task))
            if len(leased.partition.progress.blocked(task, {**leased.asked, task: columns})):
                return True
        if len(leased.partition.progress.ready(task, columns, least)) < least:
            return False
        timely = isinstance(asked.sampler, Fifo) or getattr(asked.sampler, "judges_age", False)
        return timely or in_vain != leased.changes

    # Without a log

    def alone(self, now: float, columns: ColumnStore) -> None:
        """Become the only replica, without a log: `run` decides and applies each request. `now`: the time of the
        stream's clock."""
        self.columns, self.clock_s = columns, now
        self._lead(0, now)

    def run(self, asked: r.StreamRequest, now: float) -> Any:
        """Decide a request and apply the decision. Returns the result. Raises the error that refuses it."""
        commands, result = self._decided(asked, 0, now)
        ticket = self._ticket
        try:
            for command in commands:
                result = self.act(command)
                self.leased.changes += 1
        finally:
            if ticket:  # only now, when the rows are counted
                self.leased.admission.give_back(ticket)
        return result

    # Deciding

    def decide(self, request: bytes, term: int, now: float) -> Decision:
        return self.decide_decoded(r.decode_request(request), term, now)

    def decide_decoded(self, asked: r.StreamRequest, term: int, now: float) -> Decision:
        """As `decide`, for a decoded request."""
        keys = _keys(asked)
        known = self._known(asked)
        if known is not None:
            return Decision((), known)
        for key in keys:
            flying = self._flying.get(key)
            if flying is not None and flying[0] and len(keys) == 1:
                return Decision((flying[0],))
            if flying is not None:
                raise OutcomeUnknown("this append is already in progress, merged or by itself: ask again")
        if not keys and type(asked) in (r.Append, r.ExtendRow):
            raise ProtocolMismatch("an append to a replicated stream needs a sequence, so that it is not done twice")
        commands, result = self._decided(asked, term, now)
        if not commands:
            return Decision((), r.encode_result(result))
        encoded = tuple(map(c.encode, commands))
        self._decoded.update(zip(encoded, commands, strict=True))
        ticket = self._ticket
        for key in keys:
            self._flying[key] = encoded[-1] if len(keys) == 1 else b"", ticket
            ticket = 0
        return Decision(encoded)

    def withdraw(self, request: bytes) -> None:
        self._decoded.clear()
        self._landed(_keys(r.decode_request(request)))

    def reads(self, request: bytes) -> bool:
        return isinstance(r.decode_request(request), r.READS)

    def _landed(self, keys: Sequence[tuple[str, int]]) -> None:
        """Forget decisions in flight with these sequences: they were applied or withdrawn."""
        for key in keys:
            _, ticket = self._flying.pop(key, (b"", 0))
            if ticket:
                self.leased.admission.give_back(ticket)

    def undo(self, request: bytes, result: bytes) -> bytes:
        kind, number = r.given(result)
        if kind is None:
            return b""
        asked = r.decode_request(request)
        if kind is r.AdmitResult:
            return r.encode_request(r.GiveBack(client=asked.client, ticket=number))
        if kind is r.SnapshotTaken:
            return r.encode_request(r.ReleaseSnapshot(client=asked.client, snapshot=number))
        if isinstance(asked, r.Consume) and asked.replica is not None:
            return b""  # the replica asks for its grant again
        return r.encode_request(r.Nack(client=asked.client, grant=number, seen=False))

    # Applying

    def apply(self, command: bytes) -> bytes:
        decoded = self._decoded.pop(command, None)
        return self.apply_decoded(c.decode(command) if decoded is None else decoded)

    def apply_decoded(self, command: c.AnyCommand) -> bytes:
        """As `apply`, for a decoded command, which is not modified."""
        result = self.applied(command)
        self.leased.changes += 1
        self._landed(_keys(command))  # only now, when the rows are counted
        return result

    # Clients of processes that may end

    def clients(self) -> Iterable[str]:
        named = self.holding | set(self.sessions.producers)
        return {name.rpartition("/")[0] for name in named if name.count("/") == 2}

    # Nodes that have its columns

    def holders(self) -> Iterable[str]:
        return [node.hex() for node in self.outboxes.holders if node not in self.lost_nodes]

    def waiting(self) -> Iterable[str]:
        return [name for node in self.outboxes if self.outbox(name := node.hex(), 1)[0]]

    def outbox(self, node: str, most: int) -> tuple[tuple[bytes, ...], int]:
        name = bytes.fromhex(node)
        entries, last = self.outboxes.first(name, most)
        held = min(len(entries), last - self.snapshots.outbox_limit(name, last))
        return entries[: len(entries) - held], last - held


def _keys(asked: r.StreamRequest | c.AnyCommand) -> list[tuple[str, int]]:
    """The (client, sequence) pairs by which a request or command is executed once; several for merged appends."""
    if isinstance(asked, r.Append) and asked.parts:
        return [(client, sequence) for client, sequence, _ in asked.parts]
    return [(asked.client, asked.sequence)] if asked.sequence else []
