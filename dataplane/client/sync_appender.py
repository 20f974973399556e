"""The synchronous face of appenders. `send` does not enter the loop: a row costs what it takes to look at it and to
copy it. Any thread may call."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from dataplane.client import appender, blocks
from dataplane.errors import DataplaneError

T = TypeVar("T")


class Wait(Protocol):
    """Runs a coroutine; its result or its error."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T: ...


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


class Appender:
    """See `dataplane.client.appender.AsyncAppender`; here each call waits."""

    def __init__(self, inner: appender.AsyncAppender, wait: Wait) -> None:
        self._inner = inner
        self._wait = wait

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def pending(self) -> int:
        """Rows that were sent and have not been answered."""
        return self._inner.pending

    def send(
        self,
        columns: Any,
        *,
        keys: Sequence[str] | None = None,
        group: Any = None,
        version: Any = 0,
        tags: Mapping[str, Any] | None = None,
    ) -> Sent:
        """Take rows; their keys are the result of what is returned. See `AsyncAppender.send`."""
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
        """As `stream.append`, in a block with the rows that other threads append meanwhile."""
        return self.send(columns, keys=keys, group=group, version=version, tags=tags).result()

    def flush(self) -> None:
        """Append what was sent, and wait until it is in the stream. See `AsyncAppender.flush`."""
        self._wait(self._inner.flush())

    def close(self) -> None:
        """Take no more rows, and `flush`. Idempotent."""
        self._wait(self._inner.aclose())

    def __enter__(self) -> Appender:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            with suppress(DataplaneError):  # the caller must see the error that left the block
                self.close()
