"""The synchronous interface of streams: deliveries, unfinished rows, appenders, streams. See `client.sync`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dataplane.batch.put_options import Narrow, Objects
from dataplane.batch.ref import BatchRef
from dataplane.client import blocks, delivery
from dataplane.client.appender import AsyncAppender
from dataplane.client.blocking import Wait
from dataplane.client.blocking_calls import AppenderCalls, DeliveryCalls, RowCalls, StreamCalls, TakenCalls
from dataplane.client.loop_runner import LoopRunner
from dataplane.client.streams import AsyncStream
from dataplane.client.unfinished import AsyncRow
from dataplane.errors import DataplaneError
from dataplane.stream.settings import Settings

if TYPE_CHECKING:
    from dataplane.client.history_follower import Follower
    from dataplane.client.recorder import Recording
    from dataplane.client.replay import Replay


class Delivery(DeliveryCalls):
    """Leased rows of one task. `ref` and all lists have the rows in the order of delivery."""

    _inner: delivery.Delivery

    def __init__(self, inner: delivery.Delivery, wait: Wait, turns: LoopRunner) -> None:
        super().__init__(inner, wait, turns)
        self.ref = inner.ref
        self.groups = inner.groups
        self.versions = inner.versions
        self.tags = inner.tags

    @property
    def keys(self) -> list[str]:
        """The keys of the rows."""
        return self._inner.keys

    @property
    def settled(self) -> bool:
        """Whether it was acked or given back."""
        return self._inner.settled

    def __enter__(self) -> Delivery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None = None, _: object = None) -> None:
        self._wait(self._inner.__aexit__(kind, error))


class Taken(TakenCalls, Sequence[BatchRef]):
    """The rows of one step, a reference for each rank. One delivery, settled as a whole."""

    _inner: delivery.Taken

    def __init__(self, inner: delivery.Taken, wait: Wait, turns: LoopRunner) -> None:
        super().__init__(inner, wait, turns)
        self.delivery = Delivery(inner.delivery, wait, turns)

    def __enter__(self) -> Taken:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None = None, _: object = None) -> None:
        self._wait(self._inner.__aexit__(kind, error))


class Row(RowCalls):
    """An unfinished row that this process holds. Made by `stream.begin` and `stream.resume`. As a context manager it
    is finished when the block is left, and released for others when it is left by an exception."""

    _inner: AsyncRow

    def __init__(self, inner: AsyncRow, wait: Wait, turns: LoopRunner) -> None:
        super().__init__(inner, wait, turns)
        self.key = inner.key
        self.group = inner.group
        self.tags = inner.tags
        self.spans = inner.spans
        self.tokens = inner.tokens

    @property
    def version(self) -> int:
        """The policy version of the last piece."""
        return self._inner.version

    @property
    def ended(self) -> bool:
        """Whether it was finished or abandoned here."""
        return self._inner.ended

    def __enter__(self) -> Row:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._wait(self._inner.__aexit__(kind))


class Sent:
    """Rows that were sent."""

    __slots__ = ("_inner", "_wait")

    def __init__(self, inner: blocks.Sent, wait: Wait) -> None:
        self._inner = inner
        self._wait = wait

    @property
    def done(self) -> bool:
        """Whether it is known what became of them."""
        return self._inner.done

    def result(self) -> list[str]:
        """Their keys, once they are in the stream. Raises the error with which they are not."""
        return self._inner.keys() if self._inner.done else self._wait(self._inner.wait())


class Appender(AppenderCalls):
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
        """Accept rows, with arguments as for `stream.append`. The `result()` of what is returned is their keys. Does
        not enter the loop: a row costs what it takes to look at it and to copy it. Waits if too many blocks wait.
        Raises SchemaMismatch, Misuse, Closed; an error of the stream is raised by `result`, or else by the next
        `flush`."""
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

    def __enter__(self) -> Appender:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            with suppress(DataplaneError):  # the caller sees the error that ended the block
                self.close()


def opened(address: str, kind: str, name: str) -> Any:
    """An unpickled stream or table, on a plane of its own, which it keeps open."""
    from dataplane.client.sync import connect  # above this

    plane = connect(address)
    found = getattr(plane, kind)(name)
    found._plane = plane
    return found


class Stream(StreamCalls):
    """A stream of the node of this plane. Created by `plane.stream`; any number of processes may use it at once."""

    _inner: AsyncStream
    _plane: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickled, it is the stream of this name, on a plane of its own to the same node."""
        return opened, (self._inner._connection.address, "stream", self.name)

    @property
    def name(self) -> str:
        """The name of the stream."""
        return self._inner.name

    @property
    def settings(self) -> Settings:
        """The tasks and limits of the stream."""
        return self._inner.settings

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
        how = {"max_rows": max_rows, "max_delay": max_delay, "timeout": timeout, "narrow": narrow}
        return Appender(self._inner.gathering(self._turns.begin, self._turns.soon, **how), self._wait, self._turns)

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

    @property
    def follower(self) -> Follower | None:
        """The recorder of the stream's rows in a history, if `plane.stream` was given one."""
        return self._inner.follower

    @property
    def replay(self) -> Replay | None:
        """The replay that fills the stream, if `plane.replay` created it."""
        return self._inner.replay
