"""Requests that wait at the leader of a partition until it has something for them.

Each waits in a queue (of a task, and of what it asks for), first come first served. The leader decides the request of
the first again when rows may have become ready, and goes on to the next as long as there is something: so an append
costs as many decisions as there are requests that it serves, and wakes nobody else.

A node whose request waited in vain has gone elsewhere, and is remembered: when rows become ready in a queue where
nobody waits, one such node is told that it may ask again. So nobody has to poll, and nobody has to wait everywhere.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dataplane.errors import Backpressure, DataplaneError
from dataplane.replication.machine import StateMachine

Done = Callable[[bytes | DataplaneError], None]

MAX_WAITING = 4096
"""Requests that wait at one leader."""

_REMEMBERED = 64  # nodes that asked a queue in vain
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


@dataclass(slots=True)
class _Queue:
    waiting: deque[Waiting] = field(default_factory=deque)
    in_vain: OrderedDict[str, bytes] = field(default_factory=OrderedDict)  # node -> its request


class Waiters:
    """The queues of one partition."""

    def __init__(self, machine: StateMachine) -> None:
        self._machine = machine
        self._queues: dict[str, _Queue] = {}
        self._count = 0

    def __len__(self) -> int:
        """How many wait."""
        return self._count

    def __bool__(self) -> bool:
        """Whether anybody waits, or is to be told."""
        return bool(self._queues)

    def requests(self) -> list[bytes]:
        """Those that wait."""
        return [waiting.request for queue in self._queues.values() for waiting in queue.waiting]

    def add(self, waiting: Waiting, now: float, *, first: bool = False) -> None:
        """Wait; in the end it is answered by nothing. Raises Backpressure where too many wait."""
        if self._count >= MAX_WAITING:
            raise Backpressure("too many requests wait at this partition's leader")
        queue = self._queues.setdefault(waiting.queue, _Queue())
        queue.in_vain.pop(waiting.node, None)
        (queue.waiting.appendleft if first else queue.waiting.append)(waiting)
        self._count += 1
        waiting.timer = asyncio.get_running_loop().call_later(waiting.until_s - now, self.withdraw, waiting)

    def remember(self, queue: str, node: str, request: bytes) -> None:
        """Tell this node when there is something for such a request, and nobody waits."""
        if not self._machine.tells:
            return
        in_vain = self._queues.setdefault(queue, _Queue()).in_vain
        in_vain[node] = request
        in_vain.move_to_end(node)
        if len(in_vain) > _REMEMBERED:
            in_vain.popitem(last=False)

    def withdraw(self, waiting: Waiting) -> None:
        """Wait no more: it is answered by nothing, unless it is decided already."""
        waiting.withdrawn = True
        queue = self._queues.get(waiting.queue)
        if queue is not None and waiting in queue.waiting:
            queue.waiting.remove(waiting)
            self._left(waiting)
            self.remember(waiting.queue, waiting.node, waiting.request)
            waiting.done(NOTHING)

    def _left(self, waiting: Waiting) -> None:
        self._count -= 1
        if waiting.timer is not None:
            waiting.timer.cancel()

    def served(self, now: float) -> Iterator[Waiting]:
        """The requests that there is something for, one after the other: each has to be decided before the next is
        asked for. They do not wait any more; where one waits again after all, nobody after it is served."""
        for queue in [*self._queues.values()]:
            waiting = None
            while queue.waiting and queue.waiting[0] is not waiting:
                if not self._machine.serves(queue.waiting[0].request, now):
                    break
                waiting = queue.waiting.popleft()
                self._left(waiting)
                yield waiting

    def told(self, now: float) -> Iterator[tuple[str, str]]:
        """(node, queue) of those to be told that there is something; each is told once."""
        for name, queue in [*self._queues.items()]:
            if not queue.waiting and queue.in_vain:
                node = next(reversed(queue.in_vain))
                if self._machine.serves(queue.in_vain[node], now):
                    del queue.in_vain[node]
                    yield node, name
            if not queue.waiting and not queue.in_vain:
                del self._queues[name]

    def gone(self, node: str) -> None:
        """This node has ended."""
        for queue in self._queues.values():
            for waiting in [waiting for waiting in queue.waiting if waiting.node == node]:
                self.withdraw(waiting)
            queue.in_vain.pop(node, None)

    def drain(self) -> list[Waiting]:
        """All that wait, who do not any more: another leads."""
        found = [waiting for queue in self._queues.values() for waiting in queue.waiting]
        for waiting in found:
            self._left(waiting)
        self._queues.clear()
        return found
