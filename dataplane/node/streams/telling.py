"""What the homes here tell the nodes that rows' columns are stored on: which task is done with which rows.

What always holds: each node is told in order, one message at a time, what has come up meanwhile together in the next;
who waits until it was told waits no longer than that node is a member.
"""

from __future__ import annotations

import asyncio

import numpy as np

from dataplane.errors import DataplaneError, LeaseExpired, PeerUnavailable, Retryable
from dataplane.node.streams.asking import Asking
from dataplane.stream.books import MOVED, OVER
from dataplane.stream.page import Index
from dataplane.stream.rows import Rows
from dataplane.wire import messages as m
from dataplane.wire import peer_messages as pm

_TOLD = 4096  # entries of one message
_AGAIN_S = 2.0
_BETWEEN_S = 0.01

_BYTES = 1 << 20  # of one message, about

Entry = tuple[bytes, int, bytes, int, list[tuple[bytes, bytes]]]


class Telling:
    """What the homes of one node tell the others."""

    def __init__(self, node: bytes, asking: Asking) -> None:
        self._node = node
        self._asking = asking
        self._queues: dict[bytes, list[Entry]] = {}
        self._waiting: dict[bytes, list[tuple[int, asyncio.Future[None]]]] = {}
        self._tasks: dict[bytes, asyncio.Task[None]] = {}
        self.noted = 0
        """How many times something was noted that others are to be told."""

    def note(self, token: bytes, stored: Rows, task: int, rows: Index, state: int) -> None:
        """Tell the nodes that columns of these rows are on, or were, of the part of this token, what became of them."""
        nodes = stored.ever_by_node(rows)
        there = stored.by_node(rows) | stored.expected(rows) if task >= 0 else {}
        past = stored.past_by_node(rows) if task == MOVED else {}
        for node, of in nodes.items():
            if node == self._node or not self._asking.knows(node):
                continue
            others = [(other, np.intersect1d(of, its).tobytes()) for other, its in there.items() if other != node]
            self._note(node, (token, task, of.tobytes(), state, [each for each in others if each[1]]))
            if node in past:  # what is needed at the rows' new home is not stored there
                self._note(node, (token, OVER, past[node].tobytes(), state, []))

    def _note(self, node: bytes, entry: Entry) -> None:
        self.noted += 1
        self._queues.setdefault(node, []).append(entry)
        if node not in self._tasks:
            self._tasks[node] = asyncio.get_running_loop().create_task(self._tell(node))

    async def told(self) -> None:
        """When this returns, all nodes were told what was noted before, or are no members any more. Raises LeaseExpired
        where one that stores columns of the rows has told another home of them meanwhile."""
        loop, waits = asyncio.get_running_loop(), []
        for node, queue in self._queues.items():
            waits.append(loop.create_future())
            self._waiting.setdefault(node, []).append((len(queue), waits[-1]))
        await asyncio.gather(*waits)

    async def _tell(self, node: bytes) -> None:
        queue = self._queues[node]
        try:
            while queue:
                entries = _together(queue)
                message = pm.Settled(self._asking.next_id(), settled=entries)
                try:
                    await self._asking.tell(node, message, m.Done, _AGAIN_S)
                except LeaseExpired as error:
                    del queue[: len(entries)]
                    self._served(node, len(entries), error)
                    continue
                except Retryable:
                    if not self._asking.knows(node):
                        return
                    await asyncio.sleep(_BETWEEN_S)
                    continue
                except DataplaneError:
                    pass  # it has no use for it
                del queue[: len(entries)]
                self._served(node, len(entries))
        finally:
            if self._queues.get(node) is queue:  # else this node has begun anew, and another task tells what came since
                self._tasks.pop(node, None)
                self._queues.pop(node, None)
                self._served(node, 1 << 62)

    def _served(self, node: bytes, count: int, refused: Exception | None = None) -> None:
        """So many entries of the queue were told, or refused."""
        left = []
        for due, future in self._waiting.pop(node, []):
            if due - count <= 0:
                if not future.done() and refused is not None:
                    future.set_exception(refused)
                elif not future.done():
                    future.set_result(None)
            else:
                left.append((due - count, future))
        if left:
            self._waiting[node] = left

    def begin_anew(self) -> None:
        """Rows have other homes now: nobody is told of them from here, and who waits for that hears that nobody knows:
        the others may have been told before they took this node for dead."""
        over = PeerUnavailable("others took this node for dead as they were told of this: it may count, or not")
        tasks, self._tasks, self._queues = self._tasks, {}, {}
        for node, task in tasks.items():
            self._served(node, 1 << 62, over)
            task.cancel()

    async def aclose(self) -> None:
        """Nobody is told anything more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _together(queue: list[Entry]) -> list[Entry]:
    """The first entries, as many as one message has."""
    entries, left = [], _BYTES
    for entry in queue[:_TOLD]:
        entries.append(entry)
        left -= len(entry[2]) + sum(len(rows) for _, rows in entry[4])
        if left <= 0:
            break
    return entries
