"""Requests that wait at the leader of a partition, or at a stream of a node outside a cluster.

Equal requests (of one task, for the same columns) wait in one queue, first come first served. When the first request of
a queue may be served, it is decided again, then the next one, until a request is not served. So after a commit about as
many requests are decided as are served, and no others are woken. The queue whose first request arrived first is served
first.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dataplane.errors import Backpressure, DataplaneError

Done = Callable[[bytes | DataplaneError], None]

MAX_WAITING = 1 << 16
"""The most requests that wait at one leader."""

NOTHING = b""
"""The result of a request that was not served by its deadline."""


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request of a node that may wait until the monotonic time `until_s`. `done(outcome)` is called once.
    `withdrawn`: its caller gave up, or its deadline has passed. `in_vain`: the `version` of the state machine at which
    the request was last not served."""

    queue: str
    request: Any
    done: Callable[[Any], None]
    node: str = ""
    until_s: float = math.inf
    timer: asyncio.TimerHandle | None = None
    withdrawn: bool = False
    in_vain: int = -1
    number: int = 0


class Waiters:
    """The waiting requests of one leader. `serves(waiting)`: whether the request may be served now."""

    def __init__(self, serves: Callable[[WaitingRequest], bool]) -> None:
        self._serves = serves
        self._queues: dict[str, deque[WaitingRequest]] = {}
        self._count = 0
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[WaitingRequest]:
        return (waiting for queue in self._queues.values() for waiting in queue)

    def requests(self) -> list[Any]:
        return [waiting.request for waiting in self]

    def heads(self) -> Iterator[WaitingRequest]:
        return (queue[0] for queue in self._queues.values())

    def has(self, queue: str) -> bool:
        return queue in self._queues

    def add(self, waiting: WaitingRequest, now: float, *, first: bool = False) -> None:
        """Add a request. If it is still waiting at its deadline, it is answered with NOTHING. `first`: add it again at
        the head of its queue, from which `served` has just removed it. Raises Backpressure if too many requests
        wait."""
        if self._count >= MAX_WAITING:
            raise Backpressure("too many requests wait at this partition's leader")
        queue = self._queues.setdefault(waiting.queue, deque())
        if first:
            queue.appendleft(waiting)
        else:
            waiting.number = next(self._numbers)
            queue.append(waiting)
        self._count += 1
        if waiting.until_s < math.inf:
            waiting.timer = asyncio.get_running_loop().call_later(waiting.until_s - now, self.withdraw, waiting)

    def withdraw(self, waiting: WaitingRequest) -> None:
        """If the request is queued, remove it and answer it with NOTHING. In any case mark it as `withdrawn`, so that
        it does not wait again."""
        waiting.withdrawn = True
        queue = self._queues.get(waiting.queue)
        if queue is not None and waiting in queue:
            queue.remove(waiting)
            self._left(waiting)
            waiting.done(NOTHING)

    def _left(self, waiting: WaitingRequest) -> None:
        self._count -= 1
        if waiting.timer is not None:
            waiting.timer.cancel()
        if not self._queues.get(waiting.queue, True):
            del self._queues[waiting.queue]

    def served(self) -> Iterator[WaitingRequest]:
        """Remove and yield the requests that may be served, one by one. The caller decides each before it takes the
        next. If a request is added again, no later one of its queue is yielded."""
        heads = [(queue[0].number, name) for name, queue in self._queues.items()]
        heapq.heapify(heads)
        while heads:
            _, name = heapq.heappop(heads)
            queue = self._queues.get(name)
            if queue is None or not self._serves(queue[0]):
                continue
            waiting = queue.popleft()
            self._left(waiting)
            yield waiting
            queue = self._queues.get(name)
            if queue is not None and queue[0] is not waiting:
                heapq.heappush(heads, (queue[0].number, name))

    def gone(self, node: str) -> None:
        """Withdraw the requests of a node that has ended."""
        for waiting in [each for each in self if each.node == node]:
            self.withdraw(waiting)

    def drain(self) -> list[WaitingRequest]:
        """Remove and return all waiting requests, which the caller answers."""
        found = [*self]
        self._queues.clear()
        for waiting in found:
            self._left(waiting)
        return found
