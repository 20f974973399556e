"""Consumers look for rows at the leaders of a stream's partitions, and wait where there are none.

A request goes to the own node's partition first, then to others in random order. A leader that has nothing remembers
the node, and tells it (`Ready`) when it has something and nobody waits; until then it is not asked again. When no
leader has anything, the request waits at a few of them: its own, and two drawn at random, for some seconds; then at two
others. So an idle consumer costs a few messages in some seconds, whatever the number of partitions, and a leader
that fell, with all that it remembered, is asked again by and by.

What always holds: what a leader gave to a request that was served elsewhere meanwhile is given back.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from dataplane.clock import Deadline
from dataplane.errors import DataplaneError, Lost, OutcomeUnknown, Retryable
from dataplane.node.partitions.background import Background
from dataplane.node.partitions.members import Members
from dataplane.node.partitions.replicas import Replicas
from dataplane.node.partitions.router import Router
from dataplane.node.partitions.table import Table
from dataplane.node.partitions.waiters import NOTHING

log = logging.getLogger(__name__)

WAIT_S = 2.0
"""For which a request waits at one leader before others are tried."""

_FEW = 2  # leaders to wait at, besides one's own
_AT_ONCE = 4  # leaders that are asked at a time
_PAUSE_S = 0.05

Found = tuple[str, bytes]
"""A partition, and its result."""


def _once() -> bool:
    return False


class Consuming:
    """The consumers of one node. `give_back(partition, result)` undoes what a result has given."""

    def __init__(
        self,
        members: Members,
        replicas: Replicas,
        router: Router,
        give_back: Callable[[str, bytes], Awaitable[object]],
    ) -> None:
        self._me = members.me
        self._router = router
        self._give_back = give_back
        self._empty: dict[str, set[str]] = {}  # queue -> the partitions whose leaders would tell
        self._told: set[tuple[str, str]] = set()  # (queue, partition) of which they have, since it was asked last
        self._ready: dict[str, asyncio.Event] = {}
        self._waiting: dict[str, int] = {}
        self._background = Background()
        replicas.hint = self._hint
        members.watch(self._forget)

    def _hint(self, partition: str, queue: str) -> None:
        """A leader has something."""
        self._told.add((queue, partition))
        self._empty.get(queue, set()).discard(partition)
        event = self._ready.get(queue)
        if event is not None:
            event.set()

    def _forget(self) -> None:
        """Members have come or gone, and leaders with them."""
        self._empty.clear()

    async def consume(self, table: Callable[[], Table], queue: str, request: bytes, deadline: Deadline) -> Found | None:
        """What the first leader answers that has something; None if none has before the deadline. `queue` is of this
        stream. Raises what the partitions refuse with."""
        self._waiting[queue] = self._waiting.get(queue, 0) + 1
        try:
            while True:
                event = self._ready.setdefault(queue, asyncio.Event())
                event.clear()
                found = await self._sweep(table(), queue, request, deadline)
                if found is not None or not deadline.remaining_s:
                    return found
                found = await self._wait(table(), queue, request, deadline, event)
                if found is not None or not deadline.remaining_s:
                    return found
        finally:
            self._waiting[queue] -= 1
            if not self._waiting[queue]:
                del self._waiting[queue]
                self._ready.pop(queue, None)

    def _order(self, table: Table) -> list[int]:
        """The own partition, then the others at random."""
        numbers = [partition.number for partition in table.partitions]
        random.shuffle(numbers)
        return sorted(numbers, key=lambda number: number != table.own(self._me))

    async def _sweep(self, table: Table, queue: str, request: bytes, deadline: Deadline) -> Found | None:
        """Ask those that may have something."""
        empty = self._empty.setdefault(queue, set())
        left = [number for number in self._order(table) if table.key(number) not in empty]
        own = table.own(self._me)
        while left:
            some = left[:1] if left[0] == own else left[:_AT_ONCE]
            del left[: len(some)]
            found = await self._first(table, some, queue, request, deadline, 0.0)
            if found is not None:
                return found
        return None

    async def _wait(
        self, table: Table, queue: str, request: bytes, deadline: Deadline, event: asyncio.Event
    ) -> Found | None:
        """Wait at a few leaders, or until one of the others tells."""
        order = self._order(table)
        few = order[: _FEW + (order[:1] == [table.own(self._me)])]
        return await self._first(table, few, queue, request, deadline, WAIT_S, event)

    async def _first(
        self,
        table: Table,
        numbers: list[int],
        queue: str,
        request: bytes,
        deadline: Deadline,
        wait_s: float,
        event: asyncio.Event | None = None,
    ) -> Found | None:
        """What the first of these leaders answers that has something. None if none has, or the event is set before."""
        withdrawn = asyncio.Event()
        loop = asyncio.get_running_loop()
        asking = {
            loop.create_task(self._ask(partition, queue, request, deadline, wait_s, withdrawn)): partition
            for partition in map(table.key, numbers)
        }
        told = None if event is None else loop.create_task(event.wait())
        pending: set[asyncio.Task[bytes]] = {*asking}
        patience_s: float | None = None
        try:
            while pending:
                waited = {*pending} if told is None else {*pending, told}
                done, _ = await asyncio.wait(waited, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in pending if task in done]:
                    pending.discard(task)
                    if (result := task.result()) != NOTHING:
                        return asking[task], result
                if told is not None and told.done():
                    withdrawn.set()  # those that have nothing say so, and one may have something already
                    told, patience_s = None, _PAUSE_S
                if not done:
                    return None
            if told is not None and not asking:
                await asyncio.wait([told], timeout=min(_PAUSE_S, deadline.remaining_s))
            return None
        finally:
            withdrawn.set()
            if told is not None:
                told.cancel()
            for task in pending:
                self._background.spawn(self._late(asking[task], task))

    async def _ask(
        self, partition: str, queue: str, request: bytes, deadline: Deadline, wait_s: float, withdrawn: asyncio.Event
    ) -> bytes:
        """Ask one leader. What was asked in vain of one that then fell silent is not asked again: it may have given."""
        self._told.discard((queue, partition))
        try:
            result = await self._router.ask(
                partition, request, deadline, queue=queue, wait_s=wait_s, withdrawn=withdrawn, again=_once
            )
        except (Lost, Retryable, OutcomeUnknown):  # others may have something
            await asyncio.sleep(min(_PAUSE_S, deadline.remaining_s))
            return NOTHING
        if result == NOTHING and (queue, partition) not in self._told:  # the news may have overtaken the answer
            self._empty.setdefault(queue, set()).add(partition)
        return result

    async def _late(self, partition: str, task: asyncio.Task[bytes]) -> None:
        """An answer that nobody needs any more."""
        try:
            result = await task
            if result != NOTHING:
                await self._give_back(partition, result)
        except DataplaneError as error:  # what was given comes back by itself
            log.debug("what %s gave could not be given back: %s", partition, error)

    async def aclose(self) -> None:
        """Look no more. Idempotent."""
        await self._background.aclose()
