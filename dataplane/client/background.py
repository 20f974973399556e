"""Background work: a coroutine that runs in a separate thread, with a separate plane.

Recorders, replays and history followers run in this way, so that they do not delay producers and consumers. They use
neither the event loop nor the loop runner of the plane that started them.

Invariants: `close` ends the work and waits for its end. `wait` and `close` raise the error of the work. Closing a plane
ends the work that it started. The threads are daemons, so the end of the process aborts unfinished work. The work must
lose no data when it is aborted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Self, TypeVar

from dataplane.errors import DataplaneError, NotReady, OutcomeUnknown, Retryable

if TYPE_CHECKING:
    from dataplane.client.connection import Connection
    from dataplane.client.plane import AsyncPlane

log = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSE_S = 1.0  # seconds between two attempts after a retryable error
_FLUSH_S = 5.0  # the most seconds for the flush of appenders when a plane is closed

_begun: weakref.WeakKeyDictionary[Connection, list[Background]] = weakref.WeakKeyDictionary()


class Background(ABC):
    """Background work. The end of a `with` or `async with` block ends the work. Any thread may use the object."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._address = connection.address
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun = threading.Event()
        self._stop: asyncio.Event | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name=f"dataplane-{name}", daemon=True)
        begun = [each for each in _begun.get(connection, []) if each._thread.ident is None or each.running]
        _begun[connection] = [*begun, self]

    def start(self) -> Self:
        """Start the work. Returns this object once the event loop runs."""
        self._thread.start()
        self._begun.wait()
        return self

    @abstractmethod
    async def _run(self, plane: AsyncPlane, stop: asyncio.Event) -> None:
        """Do the work until it is done or `stop` is set."""

    async def _pause(self, plane: AsyncPlane, stop: asyncio.Event, what: str, error: DataplaneError) -> None:
        """Log that `what` has failed with `error`, and wait `_PAUSE_S` or until `stop`. Raises the connection's error
        if it has ended, because no further attempt can succeed."""
        plane.connection.check()
        log.warning("%s has to %s again: %s", self._name, what, str(error))
        with suppress(TimeoutError):
            async with asyncio.timeout(_PAUSE_S):
                await stop.wait()

    async def _again(self, plane: AsyncPlane, stop: asyncio.Event, what: str, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work()`. Repeats it after errors that may pass, such as an unreachable leader, until `stop` is
        set; then raises the error."""
        while True:
            try:
                return await work()
            except (Retryable, OutcomeUnknown) as error:
                if stop.is_set():
                    raise
                await self._pause(plane, stop, what, error)

    def _main(self) -> None:
        try:
            asyncio.run(self._connected())
        except BaseException as error:
            self._error = error
            _forget(error)
            log.warning(
                "%s has ended: %s", self._name, str(error)
            )  # logged without the exception, whose frames would keep rows in memory
        finally:
            self._begun.set()

    async def _connected(self) -> None:
        from dataplane.client.connecting import Connecting  # imported late: that module imports this one

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._begun.set()
        async with Connecting(self._address, None) as plane:
            await self._run(plane, self._stop)
        await asyncio.sleep(0)  # lets the loop close the connection's socket

    @property
    def running(self) -> bool:
        """Whether the work is in progress."""
        return self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """The error that ended the work, or one that it ignored; None if it had none."""
        return self._error

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the work has ended. Raises its error, and NotReady after `timeout` seconds."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise NotReady(f"{self._name} is not done", waited_s=timeout or 0.0)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the work, and wait until it has ended. Idempotent. Raises the error of the work."""
        self.stop()
        self.wait()

    def stop(self) -> None:
        """Let the work end, without waiting for its end."""
        self._begun.wait()
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # the loop has ended in between
                self._loop.call_soon_threadsafe(self._stop.set)

    async def aclose(self) -> None:
        """As `close`, for a caller with an event loop."""
        await asyncio.to_thread(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leave(kind is None)

    def _leave(self, raising: bool) -> None:
        try:
            self.close()
        except Exception:
            if raising:  # else the error that left the block takes precedence
                raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await asyncio.to_thread(self._leave, kind is None)


def _forget(error: BaseException | None) -> None:
    """Clear the frames of an error, so that their local variables hold no memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def is_running(connection: Connection) -> bool:
    """Whether work that the plane of this connection has started is in progress."""
    return any(each.running for each in _begun.get(connection, []))


async def end_all(connection: Connection) -> None:
    """Before a plane is closed, append the rows that its appenders have accepted, within `_FLUSH_S`, and end the
    background work that it started. Raises no DataplaneError."""
    flushing = [asyncio.create_task(appender.flush()) for appender in connection.appenders]
    if flushing:
        _, late = await asyncio.wait(flushing, timeout=_FLUSH_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*flushing, return_exceptions=True)
    begun = [each for each in _begun.pop(connection, []) if each._thread.ident is not None]  # it was started
    for each in begun:
        if each.running:
            each.stop()
    for each in begun:
        with suppress(DataplaneError):  # the error was logged, and `wait` of the work raises it
            await asyncio.to_thread(each.close)
