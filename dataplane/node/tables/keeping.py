"""What a node keeps for tables whose home is another, and what it tells those that keep something for its own.

What always holds: what is kept stays until the home says that it is not needed, or is no member any more; each node is
told in order, what has come up meanwhile together, and again until it has heard or is no member any more.
"""

from __future__ import annotations

import asyncio

import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.errors import DataplaneError, PeerUnavailable, ProtocolMismatch, Retryable
from dataplane.node.streams import packed
from dataplane.node.streams.asking import Asking
from dataplane.node.streams.homes import Homes
from dataplane.stream.table import Over, Written
from dataplane.wire import messages as m
from dataplane.wire import peer_messages as pm

_TOLD = 4096  # cells of one message, by write
_BYTES = 1 << 20  # of one message, about
_BETWEEN_S = 0.05  # until a node is told again that did not answer

Entry = tuple[bytes, int, list[str], bytes, bool]


class Keeping:
    """Both sides of it, for one node."""

    def __init__(self, node: bytes, homes: Homes, asking: Asking) -> None:
        self._node = node
        self._homes = homes
        self._asking = asking
        self._kept: dict[bytes, dict[tuple[bytes, int], Written]] = {}
        self._queues: dict[bytes, list[Entry]] = {}
        self._tasks: dict[bytes, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._kept.values())) + sum(map(len, self._queues.values()))

    # for others' tables

    def keep(self, home: bytes, node: bytes, number: int, ref: BatchRef) -> None:
        """Keep what is stored here of `ref` for a table whose home is `home`. Raises Freed, Corrupt, OwnerDied;
        PeerUnavailable where that is no member, yet: that it has gone would not be heard."""
        if not self._asking.knows(home):
            raise PeerUnavailable(f"node {home.hex()} is no member here, yet")
        if (node, number) in self._kept.get(home, ()):
            return  # asked again, as the answer was lost
        self._homes.keep(ref)
        self._kept.setdefault(home, {})[node, number] = Written.of(ref)

    def let_go(self, home: bytes, node: bytes, number: int) -> None:
        """It has not come into the table, and is whose it was before."""
        written = self._forget(home, (node, number))
        if written is not None:
            self._homes.forget(written.ref)

    def thin(self, request: pm.ThinRows) -> None:
        """These cells are not needed any more. Raises ProtocolMismatch."""
        kept = self._kept.get(request.home, {})
        for node, number, columns, rows_packed, done in request.over:
            written = kept.get((node, number))
            if written is None:
                continue
            rows = packed.int64("rows", rows_packed)
            if not columns or not set(columns) <= set(written.ref.columns) or not _within(rows, len(written.ref)):
                raise ProtocolMismatch("cells that no write has brought")
            self._homes.thinned([Over(written, tuple(columns), rows, done)])
            if done:
                self._forget(request.home, (node, number))

    def _forget(self, home: bytes, write: tuple[bytes, int]) -> Written | None:
        kept = self._kept.get(home, {})
        written = kept.pop(write, None)
        if written is not None and not kept:
            del self._kept[home]
        return written

    def gone(self, node: bytes) -> None:
        """A node is no member any more: its tables are lost."""
        for written in self._kept.pop(node, {}).values():
            self._homes.thinned([Over(written, written.ref.columns, np.arange(len(written.ref)), done=True)])

    def begin_anew(self) -> None:
        """No home counts on what is kept here any more."""
        for home in list(self._kept):
            self.gone(home)

    # for the tables here

    def thinned(self, over: list[Over]) -> None:
        """These cells of tables here are not needed any more, wherever they are."""
        self._homes.thinned(over)
        for each in over:
            for holder, node, number in each.written.held:
                if self._asking.knows(holder):
                    entry = (node, number, list(each.columns), each.rows.tobytes(), each.done)
                    self._queues.setdefault(holder, []).append(entry)
                    if holder not in self._tasks:
                        self._tasks[holder] = asyncio.get_running_loop().create_task(self._tell(holder))

    async def _tell(self, node: bytes) -> None:
        queue = self._queues[node]
        try:
            while queue and self._asking.knows(node):
                entries = _together(queue)
                try:
                    await self._asking.tell(node, pm.ThinRows(self._asking.next_id(), self._node, entries), m.Done)
                except Retryable:
                    await asyncio.sleep(_BETWEEN_S)
                    continue
                except DataplaneError:
                    pass  # it has no use for it
                del queue[: len(entries)]
        finally:
            self._tasks.pop(node, None)
            self._queues.pop(node, None)

    async def aclose(self) -> None:
        """Nobody is told anything more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _within(rows: packed.Index, count: int) -> bool:
    return not len(rows) or bool(0 <= rows.min() <= rows.max() < count)


def _together(queue: list[Entry]) -> list[Entry]:
    """The first entries, as many as one message has."""
    entries, left = [], _BYTES
    for entry in queue[:_TOLD]:
        entries.append(entry)
        left -= len(entry[3]) + sum(map(len, entry[2]))
        if left <= 0:
            break
    return entries
