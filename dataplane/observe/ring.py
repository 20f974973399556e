"""The last events of a process, in shared memory: the source of `dataplane trace` and of latencies.

A node gives each client a ring: a sealed memfd that the client writes and the node reads. The client records one event
of 32 bytes at the end of each request and never waits; the node can read at any time, also after the client has died. A
node records its own work (spills, restores, fetches) in a ring of its own.

Invariants: a ring takes `RING_BYTES`, however long its process runs; one thread writes at a time; a reader never takes
an event that is being written, and checks the codes, times and names that it reads.

Rejected: a lock (0.1 us uncontended, and a dead reader would hold it); an index of the newest event (a second write
for each event; the number in each event says the same); histograms that the client updates (twice the cost for each
request; the node computes them every `FOLD_S` instead).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.observe import _writer

EVENTS = 1 << 15
"""The number of events of a ring: the last 10 seconds at 3,276 requests a second."""

EVENT_BYTES = 32
_THREADS = 63
_NAME_BYTES = 56
_HEAD_BYTES = 4096
RING_BYTES = _HEAD_BYTES + EVENTS * EVENT_BYTES

OPERATIONS = (
    "",
    "put",
    "get",
    "append",
    "extend",
    "consume",
    "ack",
    "reserve",
    "seal",
    "free",
    "table write",
    "table read",
    "table claim",
    "fetch",
    "spill",
    "restore",
    "wait",
    "request",
    "flow append",
    "flow consume",
    "flow grant",
    "flow ack",
    "failover",
)
"""The operations of events; the code is the position here. Codes never change: rings are read by other versions."""

CODE = {name: code for code, name in enumerate(OPERATIONS)}

EVENT = np.dtype(
    [
        ("began", "<u8"),
        ("ended", "<u8"),
        ("value", "<u8"),
        ("code", "<u2"),
        ("thread", "<u2"),
        ("number", "<u4"),
    ]
)
"""An event: nanoseconds of this host's monotonic clock, a value (bytes, or the identity of a flow), its operation,
the thread's position among the ring's names, and its number in the ring, modulo 2**32. For a flow `ended` is the
identity, and `value` the number of consecutive identities."""

Events = npt.NDArray[Any]

_pack = struct.Struct("<QQQHHI").pack_into
_clock = time.monotonic_ns
_MASK = EVENTS - 1
_WRAP = 0xFFFFFFFF
_LOOKED = 64  # events that are searched for new ones at a time
_GUARD = 64  # the oldest events, which a reader skips because the writer may be overwriting them


def create() -> int:
    """Create the memory of a ring, of sealed size. Returns its descriptor. Raises OSError."""
    fd = os.memfd_create("dataplane-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, RING_BYTES)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


class _ThreadState(threading.local):
    """The state of a thread."""

    place: int


class _Names:
    """Assigns positions among the names of a ring to the threads that record."""

    __slots__ = ("_count", "_memory", "_own")

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._count = 0
        self._own = _ThreadState()

    def place(self) -> int:
        """The position of this thread; 0, which has no name, after `_THREADS` others."""
        try:
            return self._own.place
        except AttributeError:
            place = self._own.place = self._named()
            return place

    def _named(self) -> int:
        """Assign a position to this thread. Thread ids do not identify a thread, because they are reused after its
        end."""
        if self._count == _THREADS:
            return 0
        place = self._count = self._count + 1
        name = threading.current_thread().name.encode(errors="replace")[:_NAME_BYTES]
        native = threading.get_native_id()
        at = place * 64
        self._memory[at : at + 64] = struct.pack(f"<Q{_NAME_BYTES}s", native, name)
        return place


class RingWriter:
    """Writes a ring, one thread at a time."""

    __slots__ = ("_memory", "writer")

    def __init__(self, fd: int | None = None) -> None:
        """Map the memory of the descriptor, which still belongs to the caller, or else private memory. Raises
        OSError."""
        self._memory = mmap.mmap(-1 if fd is None else fd, RING_BYTES)
        self.writer = _writer.Writer(self._memory, _HEAD_BYTES, EVENTS, _Names(self._memory).place)

    def record(self, code: int, began: int, value: int = 0) -> None:
        """Record an event that ends now. `began`: nanoseconds of the monotonic clock. Raises ValueError after
        `close`."""
        self.writer.record(code, began, value)

    def reader(self) -> RingReader:
        """A reader of this ring."""
        return RingReader(self._memory)

    def close(self) -> None:
        """Stop recording. Idempotent. Later calls of `record` raise ValueError."""
        self.writer.stop()
        with suppress(BufferError):  # a reader still uses the memory, and unmaps it at its end
            self._memory.close()


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread that recorded events: its system id, and its name."""

    number: int
    name: str


class RingReader:
    """Reads a ring of another process, or of this one."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._events = np.frombuffer(memory, EVENT, EVENTS, _HEAD_BYTES)
        self._folded = 0
        self.missed = 0
        """Events that were overwritten before `fresh` came to them."""

    @classmethod
    def of(cls, fd: int) -> RingReader:
        """A reader of the memory of a descriptor, which still belongs to the caller. Raises OSError."""
        return cls(mmap.mmap(fd, RING_BYTES, prot=mmap.PROT_READ))

    def recent(self, since: int, clock: Callable[[], int] = _clock) -> Events:
        """A copy of the events that ended after `since` (nanoseconds of `clock`), the oldest first, without invalid
        ones."""
        events = self._events.copy()
        events = events[events["code"] > 0]
        age = (_newest(events, self._folded) - events["number"].astype(np.int64)) & _WRAP
        young = np.flatnonzero(age < EVENTS - _GUARD)
        return _possible(events[young[np.argsort(-age[young], kind="stable")]], since, clock)

    def fresh(self) -> Events:
        """A copy of the events since the last call, each once. Events that were overwritten meanwhile are counted in
        `missed`."""
        newest = self._last()
        count = (newest - self._folded) & _WRAP
        if count > EVENTS - _GUARD:
            self.missed += count - (EVENTS - _GUARD)
            count = EVENTS - _GUARD
        self._folded = newest
        return self._before(newest, count)

    def past(self, most: int) -> PastEvents:
        """The newest events, at most `most`, and the threads. Closes this reader."""
        past = PastEvents(self._before(self._last(), most), self.threads())
        self.close()
        return past

    def _before(self, newest: int, count: int) -> Events:
        """The last `count` events up to number `newest`, without invalid ones."""
        numbers = np.arange(newest - count + 1, newest + 1) & _WRAP
        events: Events = self._events[numbers & _MASK]
        whole: Events = events[
            (events["number"] == numbers) & (events["code"] < len(OPERATIONS)) & (events["code"] > 0)
        ]
        return whole

    def _last(self) -> int:
        """The number of the newest event. The search begins at the last event read, so that pages that were never
        written stay unallocated, and an idle ring costs nothing."""
        newest = self._folded
        while True:
            numbers = np.arange(newest + 1, newest + 1 + _LOOKED) & _WRAP
            events = self._events[numbers & _MASK]
            new = (events["number"] == numbers) & (events["code"] > 0)
            if new.all():
                newest = int(numbers[-1])
                continue
            first = int(np.argmin(new))
            ahead = (int(events["number"][first]) - int(numbers[first])) & _WRAP
            if events["code"][first] > 0 and 0 < ahead < 1 << 31:  # it was overwritten since
                return _newest(self._events, self._folded)
            return (newest + first) & _WRAP

    def threads(self) -> dict[int, Thread]:
        """The threads that recorded, by position."""
        found: dict[int, Thread] = {}
        for place in range(1, _THREADS + 1):
            number, name = struct.unpack_from(f"<Q{_NAME_BYTES}s", self._memory, place * 64)
            if number:
                text = name.rstrip(b"\0").decode(errors="replace")
                found[place] = Thread(number, "".join(each if each.isprintable() else "?" for each in text))
        return found

    def close(self) -> None:
        """Release the memory. Idempotent."""
        self._events = np.zeros(EVENTS, EVENT)
        with suppress(BufferError):
            self._memory.close()


class PastEvents:
    """The last events of the ring of a process that has ended."""

    def __init__(self, events: Events, threads: Mapping[int, Thread]) -> None:
        self._events = events
        self._threads = dict(threads)

    def recent(self, since: int, clock: Callable[[], int] = _clock) -> Events:
        """The events that ended after `since` (nanoseconds of `clock`)."""
        return _possible(self._events, since, clock)

    def threads(self) -> dict[int, Thread]:
        """The threads that recorded, by position."""
        return self._threads


def _newest(events: Events, folded: int) -> int:
    """The number of the newest of these events, or `folded` if none is newer."""
    ahead = (events["number"].astype(np.int64) - folded) & _WRAP
    ahead = ahead[(events["code"] > 0) & (ahead < 1 << 31)]
    return (folded + (int(ahead.max()) if len(ahead) else 0)) & _WRAP


def _possible(events: Events, since: int, clock: Callable[[], int]) -> Events:
    """The events that ended after `since` and have valid values."""
    ends = np.where(flows(events), events["began"], events["ended"])
    fine = (ends > since) & (ends <= clock()) & (events["began"] <= ends) & (events["code"] < len(OPERATIONS))
    kept: Events = events[fine]
    return kept


def flows(events: Events) -> npt.NDArray[np.bool_]:
    """Flags of the events that are flows."""
    first, last = CODE["flow append"], CODE["flow ack"]
    found: npt.NDArray[np.bool_] = (events["code"] >= first) & (events["code"] <= last)
    return found
