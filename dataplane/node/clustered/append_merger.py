"""Merges appends of the clients of this node to one partition into one request, one command and one block of rows.

The work of a leader depends more on the number of requests than on the number of rows. Appends that arrive in one
iteration of the event loop, or while the previous request is in flight, are sent together (group commit), as Kafka's
producers batch records.

Invariant: each append has the sequence number of its client, so it is executed once, whether merged or alone. If the
partition refuses the merged appends, each is sent alone and gets its own error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dataplane.background_tasks import BackgroundTasks
from dataplane.batch.concat import concat
from dataplane.batch.ref import ShardKey
from dataplane.clock import Deadline
from dataplane.errors import DataplaneError, OutcomeUnknown, PeerUnavailable
from dataplane.node.partitions.router import Router
from dataplane.stream import requests as r

log = logging.getLogger(__name__)

_MOST = 256  # the most appends in one request
_ROWS = 16  # the most rows of an append that is merged: a larger one is sent in a request of its own
_ASK_S = 10.0


class _WaitingAppend(NamedTuple):
    """A waiting append. `future`: the number of the first row; None if the append has to be sent alone."""

    client: str
    sequence: int
    asked: r.Append
    future: asyncio.Future[int | None]


class AppendMerger:
    """The merged appends of one node. `me`: the node."""

    def __init__(self, me: bytes, router: Router, background: BackgroundTasks) -> None:
        self._me = me
        self._router = router
        self._background = background
        self._queues: dict[str, list[_WaitingAppend]] = {}
        """By partition, the appends that wait. A partition has no entry if no request is in flight and no flush is
        scheduled."""

    def takes(self, asked: r.StreamRequest) -> bool:
        """Whether this append may be merged: a few rows without keys, stored in one shard of this node."""
        if type(asked) is not r.Append or asked.keys or asked.begin is not None or asked.ticket or asked.nodes:
            return False
        shards = asked.ref.shards()
        return len(shards) == 1 and shards[0][0] == self._me and len(asked.ref) <= _ROWS

    async def append(self, partition: str, client: str, sequence: int, asked: r.Append) -> r.AppendResult | None:
        """Append rows in one request with other appends. Returns None if the append has to be sent alone. Raises
        PeerUnavailable, OutcomeUnknown."""
        loop = asyncio.get_running_loop()
        if partition not in self._queues:
            self._queues[partition] = []
            loop.call_soon(self._flush, partition)
        waiting = _WaitingAppend(client, sequence, asked, loop.create_future())
        self._queues[partition].append(waiting)
        first = await waiting.future
        return None if first is None else r.AppendResult(first, len(asked.ref), True)

    def _flush(self, partition: str) -> None:
        """Send one request with the first waiting append and all later ones that can be merged with it."""
        waiting = [each for each in self._queues[partition] if not each.future.done()]  # the others were cancelled
        kind = _kind(waiting[0].asked) if waiting else None
        some: dict[tuple[ShardKey, ...], _WaitingAppend] = {}
        left = self._queues[partition] = []
        for each in waiting:
            alike = len(some) < _MOST and _kind(each.asked) == kind
            # two appends with rows of the same shard are not merged either
            if not alike or some.setdefault(each.asked.ref.shards(), each) is not each:
                left.append(each)
        if some:
            self._background.spawn(self._ask(partition, [*some.values()]))
        else:
            del self._queues[partition]

    async def _ask(self, partition: str, some: Sequence[_WaitingAppend]) -> None:
        first: int | None = None
        error: DataplaneError | None = None
        try:
            first = await self._first(partition, some)
        except (OutcomeUnknown, PeerUnavailable) as unknown:
            error = unknown
        except asyncio.CancelledError:  # the node ends
            for each in (*some, *self._queues[partition]):
                each.future.cancel()
            raise
        for each in some:
            if not each.future.done() and error is not None:
                each.future.set_exception(error)
            elif not each.future.done():
                each.future.set_result(first)
            first = None if first is None else first + len(each.asked.ref)
        for each in self._queues[partition] if error is not None else ():  # they are sent alone, by their own deadlines
            if not each.future.done():
                each.future.set_result(None)
        self._flush(partition)

    async def _first(self, partition: str, some: Sequence[_WaitingAppend]) -> int | None:
        """The number of the first row; None if the partition refuses the merged appends."""
        try:
            body = r.encode_request(_joined(some))
            found = r.decode_result(await self._router.ask(partition, body, Deadline.after(_ASK_S), patient=False))
            return found.first if isinstance(found, r.AppendResult) else None
        except (OutcomeUnknown, PeerUnavailable):
            raise
        except DataplaneError:
            return None
        except Exception:  # the boundary: an unexpected error must not leave any of them waiting
            log.exception("merging appends to %s failed", partition)
            return None


def _kind(asked: r.Append) -> Any:
    """A key that is equal for appends that can be merged."""
    return tuple(asked.ref.schema.items()), asked.groups is None, tuple(asked.tags), tuple(asked.lengths)


def _joined(some: Sequence[_WaitingAppend]) -> r.Append:
    asked = [each.asked for each in some]
    one = asked[0]
    return r.Append(
        ref=concat([each.ref for each in asked]),
        versions=np.concatenate([each.versions for each in asked]),
        groups=None if one.groups is None else [group for each in asked for group in each.groups or ()],
        tags={name: [value for each in asked for value in each.tags[name]] for name in one.tags},
        lengths={name: np.concatenate([each.lengths[name] for each in asked]) for name in one.lengths},
        parts=[(each.client, each.sequence, len(each.asked.ref)) for each in some],
    )
