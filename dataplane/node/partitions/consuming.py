"""Consumers look for rows at the leaders of a stream's partitions, and wait where there are none.

A request goes to the own node's partition first, then to others in random order. A leader that has nothing remembers
the node, and tells it (`Ready`) when it has something and nobody waits; until then it is not asked again. When no
leader has anything, the request waits at a few of them: its own, and two drawn at random, for some seconds; then at two
others. So an idle consumer costs a few messages in some seconds, whatever the number of partitions, and a leader
that fell, with all that it remembered, is asked again by and by.

A partition that is closed, and done for the task, is not asked again; once all are, who waits is told so.

What always holds: what a leader gave to a request that was served elsewhere meanwhile is given back.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from dataplane.clock import Deadline
from dataplane.cluster.membership import Membership
from dataplane.errors import Closed, DataplaneError, Lost, OutcomeUnknown, Retryable
from dataplane.node.partitions.background import Background
from dataplane.node.partitions.replicas import Replicas
from dataplane.node.partitions.router import TRY_S, Router
from dataplane.node.partitions.table import Table
from dataplane.node.partitions.waiters import NOTHING

log = logging.getLogger(__name__)

WAIT_S = 2.0
"""For which a request waits at one leader before others are tried."""

_FEW = 2  # leaders to wait at, besides one's own
_AT_ONCE = 4  # leaders that are asked at a time
_PAUSE_S = 0.05
_QUEUES = 1024  # that are remembered, besides those where somebody waits

Found = tuple[str, bytes]
"""A partition, and its result."""

GiveBack = Callable[[str, bytes], Awaitable[object]]
"""Undoes what a result of a partition has given."""


def _once() -> bool:
    return False


@dataclass(slots=True)
class _Queue:
    """What is known of one queue. `empty`: the partitions whose leaders have nothing, and would tell; `told`: those of
    which they have, since they were asked last; `closed`: those that will never have anything again."""

    empty: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    closed: dict[str, Closed] = field(default_factory=dict)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0


class Consuming:
    """The consumers of one node."""

    def __init__(self, members: Membership, replicas: Replicas, router: Router) -> None:
        self._me = members.me
        self._router = router
        self._queues: OrderedDict[str, _Queue] = OrderedDict()
        self._background = Background()
        replicas.hint = self._hint
        members.watch(self._forget)

    def _hint(self, partition: str, queue: str) -> None:
        """A leader has something."""
        known = self._queues.get(queue)
        if known is not None:
            known.told.add(partition)
            known.empty.discard(partition)
            known.ready.set()

    def _forget(self) -> None:
        """Members have come or gone, and leaders with them."""
        for queue in self._queues.values():
            queue.empty.clear()

    def _queue(self, name: str) -> _Queue:
        queue = self._queues.setdefault(name, _Queue())
        self._queues.move_to_end(name)
        if len(self._queues) > _QUEUES:
            for idle in [each for each, of in self._queues.items() if not of.waiting and each != name][:_QUEUES]:
                del self._queues[idle]
        return queue

    async def consume(
        self, table: Callable[[], Table], name: str, request: bytes, deadline: Deadline, give_back: GiveBack
    ) -> Found | None:
        """What the first leader answers that has something; None if none has before the deadline, which no leader is
        asked without. `name`: of the queue, of this stream; `give_back(partition, result)` undoes what a result has
        given. Raises what the partitions refuse with; Closed once all have."""
        search = _Search(name, self._queue(name), request, deadline, give_back)
        search.queue.waiting += 1
        try:
            while True:
                search.queue.ready.clear()
                found = await self._sweep(table(), search)
                if found is None:
                    _check_open(table(), search.queue)
                if found is not None or not deadline.remaining_s:
                    return found
                found = await self._wait(table(), search)
                if found is not None or not deadline.remaining_s:
                    return found
        finally:
            search.queue.waiting -= 1

    def _order(self, table: Table, queue: _Queue) -> list[int]:
        """The own partition, then the others at random; without those that are closed."""
        numbers = [each.number for each in table.partitions if table.key(each.number) not in queue.closed]
        random.shuffle(numbers)
        return sorted(numbers, key=lambda number: number != table.own(self._me))

    async def _sweep(self, table: Table, search: _Search) -> Found | None:
        """Ask those that may have something."""
        empty, own = search.queue.empty, table.own(self._me)
        left = [number for number in self._order(table, search.queue) if table.key(number) not in empty]
        while left:
            some = left[:1] if left[0] == own else left[:_AT_ONCE]
            del left[: len(some)]
            found = await self._first(table, some, search)
            if found is not None:
                return found
        return None

    async def _wait(self, table: Table, search: _Search) -> Found | None:
        """Wait at a few leaders, or until one of the others tells."""
        order = self._order(table, search.queue)
        few = order[: _FEW + (order[:1] == [table.own(self._me)])]
        return await self._first(table, few, search, WAIT_S)

    async def _first(self, table: Table, numbers: list[int], search: _Search, wait_s: float = 0.0) -> Found | None:
        """What the first of these leaders answers that has something. None if none has, or one of others tells, where
        these may wait."""
        withdrawn = asyncio.Event()
        loop = asyncio.get_running_loop()
        asking = {
            loop.create_task(self._ask(partition, search, wait_s, withdrawn)): partition
            for partition in map(table.key, numbers)
        }
        told = loop.create_task(search.queue.ready.wait()) if wait_s else None
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
                await asyncio.wait([told], timeout=min(_PAUSE_S, search.deadline.remaining_s))
            return None
        finally:
            withdrawn.set()
            if told is not None:
                told.cancel()
            for task in pending:
                self._drop(task, asking[task], search)

    async def _ask(self, partition: str, search: _Search, wait_s: float, withdrawn: asyncio.Event) -> bytes:
        """Ask one leader. What was asked in vain of one that then fell silent is not asked again: it may have given."""
        queue = search.queue
        queue.told.discard(partition)
        wait_s = min(wait_s, search.deadline.remaining_s)
        try:
            result = await self._router.ask(
                partition,
                search.request,
                Deadline.after(TRY_S + wait_s),  # also where there is no time to wait: who has rows is heard
                queue=search.name,
                wait_s=wait_s,
                withdrawn=withdrawn,
                again=_once,
                late=lambda result: self._late(partition, result, search),
            )
        except Closed as error:  # others may have something
            queue.closed[partition] = error
            return NOTHING
        except (Lost, Retryable, OutcomeUnknown):
            await asyncio.sleep(min(_PAUSE_S, search.deadline.remaining_s))
            return NOTHING
        _heard(queue, partition, result)
        return result

    def _drop(self, task: asyncio.Task[bytes], partition: str, search: _Search) -> None:
        """Wait no more for a request that is under way, or has ended; what it is answered is given back."""

        def over(task: asyncio.Task[bytes]) -> None:
            if not task.cancelled() and task.exception() is None:
                self._late(partition, task.result(), search)

        task.add_done_callback(over)
        task.cancel()

    def _late(self, partition: str, result: bytes, search: _Search) -> None:
        """An answer that nobody waits for any more: what it gives is given back."""
        _heard(search.queue, partition, result)
        if result != NOTHING:
            self._background.spawn(_quietly(partition, search.give_back(partition, result)))

    async def aclose(self) -> None:
        """Look no more. Idempotent."""
        await self._background.aclose()


@dataclass(slots=True)
class _Search:
    """One consumer's request, and the queue in which it may wait."""

    name: str
    queue: _Queue
    request: bytes
    deadline: Deadline
    give_back: GiveBack


def _heard(queue: _Queue, partition: str, result: bytes) -> None:
    """Whoever asked: a leader that has nothing tells when it has, and need not be asked before."""
    if result == NOTHING and partition not in queue.told:  # the news may have overtaken the answer
        queue.empty.add(partition)


def _check_open(table: Table, queue: _Queue) -> None:
    """Raises Closed where no partition will ever have anything again."""
    errors = [queue.closed.get(table.key(each.number)) for each in table.partitions]
    if errors and errors[0] is not None and None not in errors:
        raise errors[0]


async def _quietly(partition: str, giving: Awaitable[object]) -> None:
    try:
        await giving
    except DataplaneError as error:  # what was given comes back by itself
        log.debug("what %s gave could not be given back: %s", partition, error)
