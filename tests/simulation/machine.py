"""A small stream as a state machine: append with a producer sequence and keys, lease, ack, nack.

The protocol is simulated with it, and drivers of replicas are tested with it: they know requests and results only by
`Request` and `Result` here, and the checker looks into no state but through `Audit`.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from dataplane.errors import Corrupt, LeaseExpired, Rejected
from dataplane.replication.machine import Decision, StateMachine
from dataplane.replication.sessions import Sessions

TASKS = ("train", "score")


class Append(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    client: str
    sequence: int
    rows: tuple[tuple[str, str], ...]


class Lease(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """Up to `most` rows for a task."""

    client: str
    task: str
    most: int
    lease_s: float


class Settle(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Rows that a task has done, or gives back. `rows`: (offset, lease)."""

    client: str
    sequence: int
    task: str
    rows: tuple[tuple[int, tuple[int, int]], ...]
    done: bool


Request = Append | Lease | Settle


class Appended(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """The rows' offsets, and for each whether it is new: a key has one row."""

    offsets: tuple[int, ...]
    new: tuple[bool, ...]


class Leased(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """(offset, lease, label) of each row. A lease is (term, number)."""

    rows: tuple[tuple[int, tuple[int, int], str], ...]


class Done(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """Done, or given back."""


Result = Appended | Leased | Done

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_result = msgspec.msgpack.Decoder(Result).decode


class Audit(Protocol):
    def applied(self, count: int, command: bytes, result: bytes) -> None:
        """The machine has applied a command, after so many."""


class _State(msgspec.Struct, array_like=True):
    applied: int = 0
    rows: list[str] = []  # labels, by offset
    keys: dict[str, int] = {}
    done: dict[str, set[int]] = {}
    nacks: dict[str, int] = {}
    sessions: bytes = b""


_decode_state = msgspec.msgpack.Decoder(_State).decode


class _Row(msgspec.Struct):
    """A row that a task holds."""

    lease: tuple[int, int]
    until_s: float
    settling: bool


class StreamMachine(StateMachine):
    """See the module. What is volatile are the leases, and where each task looks for rows next."""

    def __init__(self, audit: Audit) -> None:
        self._audit = audit
        self.state = _State()
        self.sessions = Sessions()
        self.forget()

    def decide(self, request: bytes, term: int, now: float) -> Decision:
        asked = decode_request(request)
        if isinstance(asked, Lease):
            return Decision((), encode(self._lease(asked, term, now)))
        before = self.sessions.result(asked.client, asked.sequence)
        if before is not None:
            return Decision((), before)
        if isinstance(asked, Settle):
            self._check(asked, now)
        return Decision((request,))

    def _lease(self, asked: Lease, term: int, now: float) -> Leased:
        done = self.state.done.get(asked.task, ())
        rows, held = self.state.rows, self._held
        given = []
        for offset in range(self._low.get(asked.task, 0), len(rows)):
            if len(given) == asked.most:
                break
            if offset in done:
                continue
            row = held.get((asked.task, offset))
            if row is not None and (row.settling or row.until_s > now):
                continue
            self._leases += 1
            lease = (term, self._leases)
            held[asked.task, offset] = _Row(lease, now + asked.lease_s, False)
            given.append((offset, lease, rows[offset]))
        low = self._low.get(asked.task, 0)
        while low < len(rows) and low in done:
            low += 1
        self._low[asked.task] = low
        return Leased(tuple(given))

    def _check(self, asked: Settle, now: float) -> None:
        """A lease that is being settled does not run out any more: whatever comes of it is decided."""
        found = []
        for offset, lease in asked.rows:
            row = self._held.get((asked.task, offset))
            if row is None or row.lease != lease or not (row.settling or row.until_s > now):
                raise LeaseExpired("the row went to somebody else, or could have")
            found.append(row)
        for row in found:
            row.settling = True

    def apply(self, command: bytes) -> bytes:
        state = self.state
        asked = decode_request(command)
        assert not isinstance(asked, Lease)
        try:
            result = self.sessions.result(asked.client, asked.sequence)
        except Rejected:
            result = b""
        if result is None:
            result = encode(self._append(asked) if isinstance(asked, Append) else self._settle(asked))
            self.sessions.keep(asked.client, asked.sequence, result)
        self._audit.applied(state.applied, command, result)
        state.applied += 1
        return result

    def _append(self, asked: Append) -> Appended:
        rows, keys = self.state.rows, self.state.keys
        offsets, new = [], []
        for key, label in asked.rows:
            offset = keys.get(key, -1) if key else -1
            new.append(offset < 0)
            if offset < 0:
                offset = len(rows)
                rows.append(label)
                if key:
                    keys[key] = offset
            offsets.append(offset)
        return Appended(tuple(offsets), tuple(new))

    def _settle(self, asked: Settle) -> Done:
        for offset, _ in asked.rows:
            self._held.pop((asked.task, offset), None)
            if asked.done:
                self.state.done.setdefault(asked.task, set()).add(offset)
            else:
                name = f"{asked.task}/{offset}"
                self.state.nacks[name] = self.state.nacks.get(name, 0) + 1
                self._low[asked.task] = min(self._low.get(asked.task, 0), offset)
        return Done()

    def snapshot(self) -> bytes:
        state = self.state
        done = {task: sorted(offsets) for task, offsets in state.done.items()}
        return encode((state.applied, state.rows, state.keys, done, state.nacks, self.sessions.snapshot()))

    def restore(self, state: bytes) -> None:
        self.sessions = Sessions()
        if state:
            try:
                self.state = _decode_state(state)
                self.sessions.restore(self.state.sessions)
            except msgspec.MsgspecError as error:
                raise Corrupt("this is no snapshot of a stream") from error
        else:
            self.state = _State()
        self.forget()

    def forget(self) -> None:
        self._held: dict[tuple[str, int], _Row] = {}
        self._low: dict[str, int] = {}
        self._leases = 0
