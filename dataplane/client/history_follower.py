"""Records a stream's rows in a history as they are done, in the process that opened the stream:
`plane.stream(history=...)`.

A task of the stream (`history` by default) consumes the rows in a thread of its own, and records them by reference. If
several processes open the stream with a history, they share its rows. The work ends when the stream is closed and all
of its rows are recorded, or when the plane is closed; then the remaining rows stay for the next process that opens the
stream with a history.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dataplane.client.background import Background
from dataplane.client.histories import AsyncHistory, Following
from dataplane.errors import Closed, LeaseExpired, Lost, Misuse, NotReady

if TYPE_CHECKING:
    from dataplane.client.plane import AsyncPlane
    from dataplane.client.streams import AsyncStream

_ROWS = 256
_WAIT_S = 0.5  # of waiting for rows, between checks whether to end


def following(history: Any) -> Following | None:
    """Validate the `history` argument of `plane.stream`. Raises Misuse."""
    found = getattr(history, "_inner", history)
    if isinstance(found, AsyncHistory):
        found = found.following()
    if found is not None and not isinstance(found, Following):
        raise Misuse(f"history= is what plane.history(NAME) returned, or its .following(...), not {history!r:.100}")
    return found


def tasks(given: Sequence[str] | None, how: Following | None) -> Sequence[str] | None:
    """The tasks of a stream with a history: those given, and the one that records."""
    if how is None or given is None or isinstance(given, str) or how.task in given:
        return given
    return [*given, how.task]


class HistoryFollower(Background):
    """The work that records a stream. `rows`: the number of recorded rows."""

    def __init__(self, stream: AsyncStream, how: Following) -> None:
        super().__init__(stream._connection, f"history of {stream.name!r}")
        stream.settings.task(how.task)
        self._stream_name, self._how = stream.name, how
        self.rows = 0

    async def _run(self, plane: AsyncPlane, stop: asyncio.Event) -> None:
        stream, how = await plane.stream(self._stream_name), self._how
        history = how.history.at(plane)
        while not stop.is_set():
            try:
                delivery = await stream.consume(how.task, rows=_ROWS, columns=how.columns, timeout=_WAIT_S)
            except NotReady:
                continue
            except Closed:
                return
            with suppress(Lost, LeaseExpired):  # rows that are gone, or went to others
                async with delivery:
                    await history.record_delivery(delivery, how)
                    self.rows += len(delivery)
