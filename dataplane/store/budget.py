"""Admits all use of memory: bytes are reserved here before they are used.

Invariants: `used` never exceeds `capacity`, and only requested bytes are granted. Requests wait in the order of
arrival, in three queues: those whose callers may free memory next, restores and then extends of rows, go before other
new bytes. Appends leave a part of the memory free for them: else a node that is full of rows that lack a column could
never store that column. A request that fits may pass an older one of its queue that does not, until the older one has
waited `passing_s`; from then on all freed bytes are kept for it. Every wait ends: with the bytes, at its deadline, or
by cancellation.

The budget knows no shards. `on_demand` is called whenever a request has to wait, so that the store can make room;
`explain` returns the holders of the bytes when a wait fails. Used from one event loop.

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

Purpose = Literal["restore", "extend", "put", "append"]
"""What bytes are for: a shard that is read back from disk, more columns of rows that are in a stream, columns of new
rows, or any other new bytes."""

_QUEUE: dict[Purpose, int] = {"restore": 0, "extend": 1, "put": 2, "append": 2}
_SPARE = 16  # appends leave the capacity, divided by this, free


@dataclass(frozen=True, slots=True)
class Holders:
    """The holders of memory and disk, and the reason why no more bytes can go to disk."""

    holders: tuple[dict[str, Any], ...] = ()
    spill_error: str = ""


def attributed(holder: Mapping[str, Any]) -> str:
    """The stream, table or scope of an entry of `holders`, and its age: " of stream rollouts, oldest 12 s"."""
    of = f" of {holder['owner']}" if holder.get("owner") else ""
    return of + (f", oldest {holder['oldest_s']:.0f} s" if holder.get("oldest_s", 0.0) >= 1.0 else "")


@dataclass(slots=True, eq=False)
class _Waiter:
    nbytes: int
    limit: int
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
        on_demand: Callable[[], None] = lambda: None,
        explain: Callable[[], Holders] = Holders,
        passing_s: float = 1.0,
        clock: Clock = monotonic,
    ) -> None:
        self.capacity = capacity
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

    def try_reserve(self, nbytes: int, purpose: Purpose = "put") -> bool:
        """Take the bytes now, if they are free and no waiting request would be overtaken unfairly.

        Raises LimitExceeded for more bytes than the capacity.
        """
        if nbytes > self.capacity:
            raise LimitExceeded(
                f"{format_size(nbytes)} at once is more than the memory budget of {format_size(self.capacity)};"
                " raise NodeConfig.memory or put smaller batches",
                what="memory",
                asked=nbytes,
                limit=self.capacity,
            )
        if self.used + nbytes > self._limit(nbytes, purpose):
            return False
        ahead = itertools.chain(*self._queues[: _QUEUE[purpose] + 1])
        if any(self._clock() - waiter.since > self._passing_s for waiter in ahead):
            return False
        self.used += nbytes
        self.peak = max(self.peak, self.used)
        return True

    def _limit(self, nbytes: int, purpose: Purpose) -> int:
        """How much may be in use with these bytes. A large append may use all of the memory."""
        spares = purpose == "append" and nbytes <= self.capacity // 2
        return self.capacity - self.capacity // _SPARE if spares else self.capacity

    def _waiters(self) -> Iterator[_Waiter]:
        return itertools.chain(*self._queues)

    async def reserve(self, nbytes: int, deadline: Deadline, purpose: Purpose = "put") -> None:
        """Take `nbytes`, waiting until the deadline.

        Raises Backpressure at the deadline, LimitExceeded at once if waiting cannot help. Cancelled, it leaves
        nothing reserved.
        """
        if self.try_reserve(nbytes, purpose):
            return
        queue = self._queues[_QUEUE[purpose]]
        wait, limit = waiting.turn("memory"), self._limit(nbytes, purpose)
        waiter = _Waiter(nbytes, limit, self._clock(), asyncio.get_running_loop().create_future(), wait)
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
                self._grant()
            if isinstance(error, TimeoutError):
                raise self.backpressure(nbytes, deadline) from None
            raise
        finally:
            if purpose == "restore":
                wait.turn_back()
            else:
                wait.turn("")
            self._waited_s += self._clock() - waiter.since

    def backpressure(self, nbytes: int, deadline: Deadline) -> Backpressure:
        """The error of a failed wait for `nbytes`."""
        why = self._explain()
        named = [holder for holder in why.holders if holder["how"] != "spilled"][:4]
        if why.spill_error:
            named += [holder for holder in why.holders if holder["how"] == "spilled"][:2]
        held = ", ".join(f"{h['holder']} {format_size(h['bytes'])} {h['how']}{attributed(h)}" for h in named)
        return Backpressure(
            f"no room for {format_size(nbytes)} of {format_size(self.capacity)} within {deadline.waited_s:.1f} s;"
            f" held by: {held or 'requests before this one'}"
            + (f"; {why.spill_error}" if why.spill_error else "")
            + ": free rows, drop views of them, or give the node more `memory` or `spill`",
            needed=nbytes,
            waited_s=deadline.waited_s,
            holders=why.holders,
            spill_error=why.spill_error,
        )

    def release(self, nbytes: int) -> None:
        """Give bytes back, to the first waiting request."""
        if nbytes > self.used:
            raise ValueError(f"{nbytes} bytes given back of {self.used} in use")
        self.used -= nbytes
        self._grant()

    def _grant(self) -> None:
        now = self._clock()
        for queue in self._queues:
            for waiter in list(queue):
                if waiter.granted.done():
                    continue  # cancelled, and about to leave the queue
                if self.used + waiter.nbytes <= waiter.limit:
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

    @property
    def shortfall(self) -> int:
        """Bytes that must be freed before the first waiting request can be granted."""
        first = next(self._waiters(), None)
        return 0 if first is None else max(0, self.used + first.nbytes - first.limit)

    @property
    def restoring(self) -> bool:
        return bool(self._queues[_QUEUE["restore"]])

    def statistics(self) -> BudgetStatistics:
        waiting, now = list(self._waiters()), self._clock()
        nbytes, waited_s = sum(w.nbytes for w in waiting), self._waited_s + sum(now - w.since for w in waiting)
        return BudgetStatistics(self.capacity, self.used, len(waiting), nbytes, self._waits, waited_s)
