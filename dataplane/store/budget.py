"""Admits all use of memory: bytes are reserved here before they are used.

Invariants: `used` never exceeds `capacity`, and only requested bytes are granted. Requests wait in the order of
arrival, in three queues: restores, extends of rows, other new bytes. The first two go first, because their callers may
free memory next. A restore only has to fit in memory. New bytes also have to leave room to read back the shards on disk
(`store.stored`). Appends leave a part free for extends: else a node full of rows without a column could never store
that column. A request that fits may pass an older one of its own or an earlier queue that does not fit. Once the older
one has waited `passing_s`, requests behind it in its own and later queues wait. Every wait ends: with the bytes, at its
deadline, or by cancellation.

The budget knows no shards. `on_demand` is called whenever a request has to wait, so that the store can make room;
`explain` returns the holders of memory and disk, for the error of a failed wait. Used from one event loop.

Rejected: a semaphore of bytes (no order between large and small requests, no error that names the holders).
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dataplane import waiting
from dataplane.clock import Clock, Deadline, monotonic
from dataplane.config import format_size
from dataplane.errors import Backpressure, LimitExceeded
from dataplane.store.stored import Rooms, StoredBytes

Purpose = Literal["restore", "extend", "put", "append"]
"""What bytes are for: a shard that is read back from disk, more columns of rows that are in a stream, columns of new
rows, or any other new bytes."""

_QUEUE: dict[Purpose, int] = {"restore": 0, "extend": 1, "put": 2, "append": 2}


@dataclass(frozen=True, slots=True)
class Holders:
    """The holders of memory and disk, and the reason why no more bytes can go to disk."""

    holders: tuple[dict[str, Any], ...] = ()
    spill_error: str = ""


def attributed(holder: Mapping[str, Any]) -> str:
    """The stream, table or scope of an entry of `holders`, and its age: " of stream rollouts, oldest 12 s"."""
    of = f" of {holder['owner']}" if holder.get("owner") else ""
    return of + (f", oldest {holder['oldest_s']:.0f} s" if holder.get("oldest_s", 0.0) >= 1.0 else "")


def _of_stream(holder: Mapping[str, Any]) -> bool:
    return str(holder.get("owner", "")).startswith("stream ")


@dataclass(slots=True, eq=False)
class _Waiter:
    nbytes: int
    purpose: Purpose
    room: int
    since: float
    granted: asyncio.Future[None]
    wait: waiting.RequestWait


@dataclass(frozen=True, slots=True)
class BudgetStatistics:
    """In bytes, except the counts `waiting` and `waits` and the seconds `waited_s`."""

    capacity: int
    used: int
    waiting: int
    waiting_bytes: int
    waits: int
    waited_s: float


class Budget:
    """Grants `capacity` bytes."""

    def __init__(
        self,
        capacity: int,
        *,
        stored: StoredBytes | None = None,
        on_demand: Callable[[], None] = lambda: None,
        explain: Callable[[bool], Holders] = lambda full: Holders(),
        passing_s: float = 1.0,
        clock: Clock = monotonic,
    ) -> None:
        """`explain(full)` returns the holders, for an error; `full`: the bytes were refused to keep room for reading
        back. `stored`: the bytes of memory and disk; None: there is no disk. `passing_s`: see the module."""
        self.capacity = capacity
        self._stored = StoredBytes(capacity, lambda: 0, Rooms()) if stored is None else stored
        self.used = 0
        self.peak = 0
        """The most bytes that were ever in use."""
        self._on_demand = on_demand
        self._explain = explain
        self._passing_s = passing_s
        self._clock = clock
        self._queues: tuple[deque[_Waiter], ...] = (deque(), deque(), deque())  # restores; extends; puts and appends
        self._waits = 0
        self._waited_s = 0.0

    def try_reserve(self, nbytes: int, purpose: Purpose = "put", room: int = 0) -> bool:
        """Reserve the bytes at once, unless they do not fit or a request before them has waited `passing_s`. Returns
        whether they are reserved. `room`: the bytes of the largest shard among them; 0: they are one shard.

        Raises LimitExceeded for more bytes than the capacity.
        """
        if nbytes > self.capacity:
            raise LimitExceeded(
                f"{format_size(nbytes)} at once is more than the memory budget of {format_size(self.capacity)};"
                " raise NodeConfig.memory (--memory) or put smaller batches",
                what="memory",
                asked=nbytes,
                limit=self.capacity,
            )
        if self.used + nbytes > self.capacity or not self.admits(nbytes, purpose, room or nbytes):
            return False
        ahead = itertools.chain(*self._queues[: _QUEUE[purpose] + 1])
        if any(self._clock() - waiter.since > self._passing_s for waiter in ahead):
            return False
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        return True

    def admits(self, nbytes: int, purpose: Purpose, room: int) -> bool:
        """Whether these bytes leave room to read back the others, and, for an append of at most half the capacity, the
        part for extends. A restore is always admitted."""
        spare = purpose == "append" and nbytes <= self.capacity // 2
        return purpose == "restore" or self._stored.admits(self.used, nbytes, room, spare=spare)

    def _waiters(self) -> Iterator[_Waiter]:
        return itertools.chain(*self._queues)

    async def reserve(self, nbytes: int, deadline: Deadline, purpose: Purpose = "put", room: int = 0) -> None:
        """Reserve the bytes, and wait for them until the deadline. `room`: the bytes of the largest shard among them;
        0: they are one shard.

        Raises Backpressure at the deadline, LimitExceeded at once for more bytes than the capacity. After an error or a
        cancellation nothing is reserved.
        """
        if self.try_reserve(nbytes, purpose, room):
            return
        queue = self._queues[_QUEUE[purpose]]
        wait, granted = waiting.turn("memory"), asyncio.get_running_loop().create_future()
        waiter = _Waiter(nbytes, purpose, room or nbytes, self._clock(), granted, wait)
        queue.append(waiter)
        self._waits += 1
        self._on_demand()
        try:
            async with asyncio.timeout(deadline.remaining_s):
                await waiter.granted
        except BaseException as error:
            if waiter.granted.done() and not waiter.granted.cancelled():
                self.release(nbytes)
            else:
                queue.remove(waiter)
                self.grant()
            if isinstance(error, TimeoutError):
                full = not self.admits(nbytes, purpose, waiter.room)
                raise self.backpressure(nbytes, deadline, full=full) from None
            raise
        finally:
            if purpose == "restore":
                wait.turn_back()
            else:
                wait.turn("")
            self._waited_s += self._clock() - waiter.since

    def backpressure(self, nbytes: int, deadline: Deadline, *, full: bool = False) -> Backpressure:
        """Return the error of a failed wait for `nbytes`. `full`: they were refused to keep room for reading back."""
        why = self._explain(full)
        named = [holder for holder in why.holders if holder["how"] != "spilled"][:4]
        if why.spill_error:
            named += [holder for holder in why.holders if holder["how"] == "spilled"][:2]
        held = ", ".join(f"{h['holder']} {format_size(h['bytes'])} {h['how']}{attributed(h)}" for h in named)
        limit = " set `max_bytes` of the streams," if any(map(_of_stream, named)) else ""
        return Backpressure(
            f"no room for {format_size(nbytes)} of {format_size(self.capacity)} within {deadline.waited_s:.1f} s;"
            f" held by: {held or 'requests before this one'}"
            + (f"; {why.spill_error}" if why.spill_error else "")
            + f": free rows, drop views of them,{limit} or give the node more `memory` or `spill`",
            needed=nbytes,
            waited_s=deadline.waited_s,
            holders=why.holders,
            spill_error=why.spill_error,
        )

    def release(self, nbytes: int) -> None:
        """Give bytes back, and grant waiting requests that fit now. Raises ValueError for more bytes than in use."""
        if nbytes > self.used:
            raise ValueError(f"{nbytes} bytes given back of {self.used} in use")
        self.used -= nbytes
        self.grant()

    def grant(self) -> None:
        """Grant the waiting requests that fit now. To be called when memory or disk holds fewer bytes than before."""
        now = self._clock()
        for queue in self._queues:
            for waiter in list(queue):
                if waiter.granted.done():
                    continue  # cancelled, and about to leave the queue
                if self.used + waiter.nbytes <= self.capacity and self._admitted(waiter):
                    queue.remove(waiter)
                    self.used += waiter.nbytes
                    self.peak = max(self.peak, self.used)
                    waiter.wait.ended()
                    waiter.granted.set_result(None)
                elif now - waiter.since > self._passing_s:
                    self._on_demand()
                    return
        if any(self._queues):
            self._on_demand()

    def _admitted(self, waiter: _Waiter) -> bool:
        return self.admits(waiter.nbytes, waiter.purpose, waiter.room)

    @property
    def shortfall(self) -> int:
        """The bytes of memory to free for the first waiting request that lacks nothing else; 0 if there is none."""
        for waiter in self._waiters():
            if self._admitted(waiter):
                return max(0, self.used + waiter.nbytes - self.capacity)
            if self._clock() - waiter.since > self._passing_s:
                break  # it holds up the others
        return 0

    @property
    def waiting(self) -> bool:
        return any(self._queues)

    @property
    def restoring(self) -> bool:
        return bool(self._queues[_QUEUE["restore"]])

    def statistics(self) -> BudgetStatistics:
        waiting, now = list(self._waiters()), self._clock()
        nbytes, waited_s = sum(w.nbytes for w in waiting), self._waited_s + sum(now - w.since for w in waiting)
        return BudgetStatistics(self.capacity, self.used, len(waiting), nbytes, self._waits, waited_s)
