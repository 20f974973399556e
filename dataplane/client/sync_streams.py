"""The synchronous interface of streams: deliveries, unfinished rows, appenders, streams. See `client.sync`."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dataplane.batch.put_options import Narrow, Objects
from dataplane.batch.ref import BatchRef
from dataplane.client import blocks, delivery
from dataplane.client.appender import AsyncAppender
from dataplane.client.blocking import BlockingCall, Context, of_inner
from dataplane.client.blocking_calls import AppenderCalls, DeliveryCalls, RowCalls, StreamCalls, TakenCalls
from dataplane.client.streams import AsyncStream
from dataplane.client.unfinished import AsyncRow
from dataplane.errors import DataplaneError
from dataplane.stream.settings import StreamSettings

if TYPE_CHECKING:
    from dataplane.client.history_follower import HistoryFollower
    from dataplane.client.recorder import Recording, Replay
    from dataplane.client.sync import Plane


class Delivery(DeliveryCalls, Context):
    """Leased rows of one task. `ref` and all lists have the rows in the order of delivery."""

    _inner: delivery.Delivery
    ref: BatchRef = of_inner("ref", "The rows, of the columns that were asked for.")
    groups: list[str | int | None] = of_inner("groups", "The groups of the rows, None for a row without one.")
    versions: list[int] = of_inner("versions", "The policy versions that wrote the rows.")
    tags: dict[str, list[Any]] = of_inner("tags", "The tags of the rows: for each name a list with a value a row.")
    keys: list[str] = of_inner("keys", "The keys of the rows.")
    settled: bool = of_inner("settled", "Whether it was acked or given back.")


class Taken(TakenCalls, Context, Sequence[BatchRef]):
    """The rows of one step, a reference for each rank. One delivery, settled as a whole."""

    _inner: delivery.Taken

    @property
    def delivery(self) -> Delivery:
        """The delivery of all rows."""
        return Delivery(self._inner.delivery, self._wait, self._turns)


class Row(RowCalls, Context):
    """An unfinished row that this process holds. Made by `stream.begin` and `stream.resume`. As a context manager it
    is finished when the block is left, and released for others when it is left by an exception."""

    _inner: AsyncRow
    key: str = of_inner("key")
    group: str | int | None = of_inner("group")
    tags: dict[str, Any] = of_inner("tags")
    spans: list[tuple[int, int]] = of_inner("spans")
    tokens: int = of_inner("tokens", "The number of tokens that it had when it was begun or resumed.")
    version: int = of_inner("version", "The policy version of the last piece.")
    ended: bool = of_inner("ended", "Whether it was finished or abandoned here.")


class Sent:
    """Rows that were sent."""

    __slots__ = ("_inner", "_wait")

    def __init__(self, inner: blocks.Sent, wait: BlockingCall) -> None:
        self._inner = inner
        self._wait = wait

    @property
    def done(self) -> bool:
        """Whether the result is known: keys or an error."""
        return self._inner.done

    def result(self) -> list[str]:
        """Their keys, once they are in the stream. Raises the error with which they are not."""
        return self._inner.keys() if self._inner.done else self._wait(self._inner.wait())


class Appender(AppenderCalls, Context):
    """Gathers rows of this process into blocks, each appended as one. As a context manager it is closed at the end of
    the block."""

    _inner: AsyncAppender

    def send(
        self,
        columns: Any,
        *,
        keys: Sequence[str] | None = None,
        group: Any = None,
        version: Any = 0,
        tags: Mapping[str, Any] | None = None,
    ) -> Sent:
        """Accept rows, with arguments as for `stream.append`. `result()` of the returned object gives their keys. Does
        not enter the event loop: a row costs its validation and its copy. Waits if too many blocks wait. Raises
        SchemaMismatch, Misuse, Closed; an error of the stream is raised by `result`, or else by the next `flush`."""
        while (sent := self._inner.offer(columns, keys, group, version, tags)) is None:
            self._wait(self._inner.room())
        return Sent(sent, self._wait)

    def append(
        self,
        columns: Any,
        *,
        keys: Sequence[str] | None = None,
        group: Any = None,
        version: Any = 0,
        tags: Mapping[str, Any] | None = None,
    ) -> list[str]:
        return self.send(columns, keys=keys, group=group, version=version, tags=tags).result()

    def close(self) -> None:
        """Accept no more rows, and `flush`. Idempotent."""
        self._wait(self._inner.aclose())


_planes: dict[str, Plane] = {}
"""The planes of the streams and tables that this process has unpickled, by the address of the node."""

_opening = threading.Lock()


def _plane_at(address: str) -> Plane:
    from dataplane.client.sync import connect  # above this

    with _opening:
        with suppress(KeyError, DataplaneError):  # it was closed, is the parent's, or the node has gone
            _planes[address]._inner.check()
            return _planes[address]
        _planes[address] = connect(address)
        return _planes[address]


def _after_fork_in_child() -> None:
    global _opening
    _opening = threading.Lock()  # another thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork_in_child)


def opened(address: str, kind: str, name: str) -> Any:
    """An unpickled stream or table, on the plane of this process for those of that node, which it keeps open."""
    plane = _plane_at(address)
    found = getattr(plane, kind)(name)
    found._plane = plane
    return found


class Stream(StreamCalls):
    """A stream of the node of this plane. Created by `plane.stream`; any number of processes may use it at once."""

    _inner: AsyncStream
    _plane: Any = None
    name: str = of_inner("name", "The name of the stream.")
    settings: StreamSettings = of_inner("settings", "The tasks and limits of the stream.")
    follower: HistoryFollower | None = of_inner(
        "follower", "What records its rows in a history that `plane.stream` was given."
    )
    replay: Replay | None = of_inner("replay", "The replay that fills the stream, if `plane.replay` created it.")

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickled, it is the stream of this name on the same node. What a process unpickles shares a plane."""
        return opened, (self._inner._connection.address, "stream", self.name)

    def append(
        self,
        columns: Any,
        *,
        keys: Sequence[str] | None = None,
        group: Any = None,
        version: Any = 0,
        tags: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        narrow: Narrow = False,
        objects: Objects = "store",
    ) -> list[str]:
        if self._turns.free and not narrow and objects == "store" and not self._inner.traced:
            asked = self._inner.writes.appending(columns, keys, group, version, tags, timeout)
            if asked is not None:
                return self._turns.ask(asked)
        how: dict[str, Any] = {"keys": keys, "group": group, "version": version, "tags": tags}
        return self._wait(self._inner.append(columns, **how, timeout=timeout, narrow=narrow, objects=objects))

    def appender(
        self,
        *,
        max_rows: int = 256,
        max_delay: float = 0.005,
        timeout: float | None = None,
        narrow: Narrow = False,
    ) -> Appender:
        how: dict[str, Any] = {"max_rows": max_rows, "max_delay": max_delay, "timeout": timeout, "narrow": narrow}
        inner = AsyncAppender(self._inner, self._turns.begin, self._turns.soon, **how)
        return Appender(inner, self._wait, self._turns)

    def extend(
        self,
        rows: BatchRef | Sequence[str],
        columns: Any,
        *,
        replace: bool = False,
        timeout: float | None = None,
        narrow: Narrow = False,
        objects: Objects = "store",
    ) -> None:
        one = self._turns.free and not narrow and objects == "store" and not self._inner.traced
        asked = self._inner.writes.extending(rows, columns, replace, timeout) if one else None
        if asked is None:
            how: dict[str, Any] = {"replace": replace, "timeout": timeout, "narrow": narrow, "objects": objects}
            self._wait(self._inner.extend(rows, columns, **how))
        else:
            self._turns.ask(asked)

    def record(self, directory: str | os.PathLike[str], columns: Sequence[str] | None = None, **how: Any) -> Recording:
        from dataplane.client import recorder  # as for checkpoints

        return recorder.record(self._inner, directory, columns, **how)
