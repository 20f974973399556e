"""Requests that wait for something that there is not yet: at the leader of a partition, or at a stream of one node.

Each waits in a queue (of a task, and of what it asks for), first come first served. The first of each is decided again
when there may be something for it, and the next as long as there is something: so a commit costs as many decisions as
there are requests that it serves, and wakes nobody else. Of several queues the one goes first whose first request came
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
"""Requests that wait at one leader."""

NOTHING = b""
"""The result of a request for which there is nothing now."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A request of a node, that waits until `until_s` at most. `done(outcome)` is called once. `withdrawn`: nobody
    waits. `in_vain`: at which change there was nothing for it, where that is noted."""

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
    """Those of one leader. `serves(waiting)`: whether there may be something for this request."""

    def __init__(self, serves: Callable[[Waiting], bool]) -> None:
        self._serves = serves
        self._queues: dict[str, deque[Waiting]] = {}
        self._count = 0
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        """How many wait."""
        return self._count

    def __iter__(self) -> Iterator[Waiting]:
        """Those that wait."""
        return (waiting for queue in self._queues.values() for waiting in queue)

    def requests(self) -> list[Any]:
        """Those that wait."""
        return [waiting.request for waiting in self]

    def heads(self) -> Iterator[Waiting]:
        """The first of each queue."""
        return (queue[0] for queue in self._queues.values())

    def has(self, queue: str) -> bool:
        """Whether any waits in this queue."""
        return queue in self._queues

    def add(self, waiting: Waiting, now: float, *, first: bool = False) -> None:
        """Wait; in the end it is answered by nothing. `first`: again, as it came. Raises Backpressure where too many
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

    def withdraw(self, waiting: Waiting) -> None:
        """Wait no more: it is answered by nothing, unless it is decided already."""
        waiting.withdrawn = True
        queue = self._queues.get(waiting.queue)
        if queue is not None and waiting in queue:
            queue.remove(waiting)
            self._left(waiting)
            waiting.done(NOTHING)

    def _left(self, waiting: Waiting) -> None:
        self._count -= 1
        if waiting.timer is not None:
            waiting.timer.cancel()
        if not self._queues.get(waiting.queue, True):
            del self._queues[waiting.queue]

    def served(self) -> Iterator[Waiting]:
        """The requests that there is something for, one after the other: each has to be decided before the next is
        asked for. They do not wait any more; where one waits again after all, nobody after it in its queue is
        served."""
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
        """This node has ended."""
        for waiting in [each for each in self if each.node == node]:
            self.withdraw(waiting)

    def drain(self) -> list[Waiting]:
        """All that wait, who do not any more: another leads."""
        found = [*self]
        self._queues.clear()
        for waiting in found:
            self._left(waiting)
        return found
