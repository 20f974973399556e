"""Snapshots of streams that one client reads. The leader of the partition keeps a snapshot, and what its
columns need, until it is released, its client goes, or another leads."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

from dataplane.errors import Closed, Lost, Misuse
from dataplane.node.streams.sessions import Session, Stream
from dataplane.stream import requests as r
from dataplane.wire import messages as m


class Snapshots:
    """The snapshots of one client."""

    def __init__(self, session: Session, dropped: Callable[[Stream], Awaitable[bool]], first: int) -> None:
        """`first`: the number of the first."""
        self._session = session
        self._dropped = dropped
        self._taken: dict[int, tuple[Stream, Any, int]] = {}
        self._numbers = itertools.count(first)
        self._releasing: asyncio.Task[Any] | None = None

    async def take(self, request: m.TakeSnapshot, stream: Stream, partition: Any) -> m.SnapshotTaken:
        """The rows as they are now. Raises LimitExceeded, PeerUnavailable, Lost."""
        if self._releasing is not None:
            await asyncio.wait([self._releasing])  # or the partition would count that too
        taken = await self._session.ask(partition, r.TakeSnapshot(), r.SnapshotTaken)
        number = next(self._numbers)
        self._taken[number] = stream, partition, taken.snapshot
        return m.SnapshotTaken(request.id, number, taken.head)

    async def read(self, request: m.ReadSnapshot) -> m.SnapshotRows:
        """Some of its rows. Raises LeaseExpired where another leads since, Closed, Lost, Misuse."""
        if request.snapshot not in self._taken:
            raise Misuse(f"no rows {request.first} and {request.count} more of a snapshot {request.snapshot}")
        stream, partition, number = self._taken[request.snapshot]
        asked = r.ReadSnapshot(snapshot=number, first=request.first, count=request.count)
        try:
            found = await self._session.ask(partition, asked, r.SnapshotRows)
        except Lost:
            if await self._dropped(stream):
                raise Closed("the stream was dropped") from None
            raise
        columns = [(rows.tobytes(), task, ref.encode()) for rows, task, ref in found.columns]
        return m.SnapshotRows(request.id, found.block, columns)

    def release(self, number: int) -> None:
        """Nobody reads the snapshot any more."""
        if number in self._taken:
            _, partition, snapshot = self._taken.pop(number)
            self._releasing = self._session.soon(partition, r.ReleaseSnapshot(snapshot=snapshot))

    def leave(self) -> None:
        """The client has gone; partitions hear it from its session."""
        self._taken.clear()
