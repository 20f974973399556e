"""Requests that wait at the leader of a partition until it has something for them.

Each waits in a queue (of a task, and of what it asks for), first come first served. The leader decides the request of
the first again when rows may have become ready, and goes on to the next as long as there is something: so a commit
costs as many decisions as there are requests that it serves, and wakes nobody else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dataplane.errors import Backpressure, DataplaneError
from dataplane.replication.machine import StateMachine

Done = Callable[[bytes | DataplaneError], None]

MAX_WAITING = 1 << 16
"""Requests that wait at one leader."""

NOTHING = b""
"""The result of a request for which there is nothing now."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A request of a node, that waits until `until_s` at most. `done` is called once. `withdrawn`: nobody waits."""

    queue: str
    request: bytes
    done: Done
    node: str
    until_s: float
    timer: asyncio.TimerHandle | None = None
    withdrawn: bool = False


class Waiters:
    """Those of one leader."""

    def __init__(self, machine: StateMachine) -> None:
        self._machine = machine
        self._queues: dict[str, deque[Waiting]] = {}
        self._count = 0

    def __len__(self) -> int:
        """How many wait."""
        return self._count

    def requests(self) -> list[bytes]:
        """Those that wait."""
        return [waiting.request for queue in self._queues.values() for waiting in queue]

    def add(self, waiting: Waiting, now: float, *, first: bool = False) -> None:
        """Wait; in the end it is answered by nothing. Raises Backpressure where too many wait."""
        if self._count >= MAX_WAITING:
            raise Backpressure("too many requests wait at this partition's leader")
        queue = self._queues.setdefault(waiting.queue, deque())
        (queue.appendleft if first else queue.append)(waiting)
        self._count += 1
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

    def served(self, now: float) -> Iterator[Waiting]:
        """The requests that there is something for, one after the other: each has to be decided before the next is
        asked for. They do not wait any more; where one waits again after all, nobody after it is served."""
        for queue in [*self._queues.values()]:
            waiting = None
            while queue and queue[0] is not waiting:
                if not self._machine.serves(queue[0].request, now):
                    break
                waiting = queue.popleft()
                self._left(waiting)
                yield waiting

    def gone(self, node: str) -> None:
        """This node has ended."""
        for waiting in [each for queue in self._queues.values() for each in queue if each.node == node]:
            self.withdraw(waiting)

    def drain(self) -> list[Waiting]:
        """All that wait, who do not any more: another leads."""
        found = [waiting for queue in self._queues.values() for waiting in queue]
        self._queues.clear()
        for waiting in found:
            self._left(waiting)
        return found
