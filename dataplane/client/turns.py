"""An event loop for callers that do not have one: whoever waits for something runs it.

Handing a call to a loop in another thread and back costs two wake-ups, 100 to 200 microseconds here. So a thread that
calls while nobody runs the loop takes its turn and runs it itself, until its call is done (leader and followers,
Schmidt et al. 2000). Who calls while another's turn lasts hands its coroutine over and waits; a thread in the
background, the keeper, then has a turn for as long as anybody waits, or `busy` says that something must go on.

What always holds: the loop is run by one thread at a time; what was handed over is run to its end, also when the
thread whose turn it was leaves; an interrupted call (Ctrl-C) is cancelled, never the loop's own work.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal's own functions make enums, 20 microseconds a call
import asyncio
import queue
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from dataplane.errors import Closed, Misuse
from dataplane.wire.polling import PollingSelector, polling_loop

T = TypeVar("T")


class Turns:
    """A loop, and whose turn it is to run it. `close` ends it."""

    def __init__(self) -> None:
        self.busy: Callable[[], bool] = lambda: False
        """Whether something must go on although nobody waits for it. Asked when a call ends."""
        self._selector = PollingSelector()
        self._loop = polling_loop(self._selector)
        self._turn = threading.Lock()
        self._waiting: set[object] = set()  # changed by single operations, so that any thread may
        self._ended = asyncio.Event()
        self._open = True
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()  # reentrant: finalizers put into it
        self._keeper = threading.Thread(target=self._keep, name="dataplane", daemon=True)
        self._keeper.start()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine; its result or its error. Any thread may call, also one that runs a loop of its own (as
        notebooks do), which then stands still meanwhile. Raises Misuse in a finalizer that runs within another call.
        """
        running = asyncio._get_running_loop()
        if running is self._loop:
            coroutine.close()
            raise Misuse(
                "a plane was used within a call of it, by an object's finalizer most likely; it would wait forever"
            )
        if running is not None or not self._turn.acquire(blocking=False):
            return self._hand_over(coroutine)
        task: asyncio.Task[T] | None = None
        try:
            self._check(coroutine)
            self._selector.polls = True
            task = self._loop.create_task(coroutine)
            self._run(task)
            return task.result()
        finally:
            task = None  # an error must not hold what holds it: with them would stay what the call was given
            self._turn.release()
            if self.busy():
                self._calls.put(None)

    @contextmanager
    def _interrupting(self, task: asyncio.Task[Any]) -> Iterator[None]:
        """Let Ctrl-C cancel the task instead of breaking off whatever the loop is doing (as asyncio.Runner does)."""
        main = threading.current_thread() is threading.main_thread()
        if not main or _signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        interrupted = False

        def interrupt(*_: object) -> None:
            nonlocal interrupted
            interrupted = True
            self._loop.call_soon_threadsafe(task.cancel)  # between two steps of the loop's, not within one

        _signal.signal(signal.SIGINT, interrupt)
        try:
            yield
            if interrupted and task.cancelled():
                raise KeyboardInterrupt
        finally:
            _signal.signal(signal.SIGINT, signal.default_int_handler)

    def _run(self, task: asyncio.Task[Any]) -> None:
        """As `run_until_complete`, but for the error: that is left in the task."""
        task.add_done_callback(self._stop)
        try:
            with self._interrupting(task):
                self._loop.run_forever()
        finally:
            task.remove_done_callback(self._stop)

    def _stop(self, _: object) -> None:
        self._loop.stop()

    def _hand_over(self, coroutine: Coroutine[Any, Any, T]) -> T:
        waiting, cancel = self._begin(coroutine)
        try:
            return waiting.result()
        except BaseException:
            if waiting.cancel():  # interrupted
                cancel()
            raise
        finally:
            del waiting, cancel  # as in `wait`

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> tuple[Future[T], Callable[[], object]]:
        """Have the coroutine run by whoever runs the loop: what will come of it, and how to cancel it."""
        waiting: Future[T] = Future()
        begun: list[asyncio.Task[T]] = []

        def begin() -> None:
            begun.append(self._loop.create_task(coroutine))
            begun[0].add_done_callback(ended)

        def ended(task: asyncio.Task[T]) -> None:  # which comes also where the task was cancelled before it began
            self._waiting.discard(waiting)
            self._ended.set()
            error = asyncio.CancelledError() if task.cancelled() else task.exception()
            if waiting.set_running_or_notify_cancel():
                if error is None:
                    waiting.set_result(task.result())
                else:
                    waiting.set_exception(error)
            begun.clear()

        def cancel() -> None:
            self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in begun])

        self._waiting.add(waiting)  # before looking whether it is open: the keeper sees either this, or nobody comes
        try:
            self._check(coroutine)
        except Closed:
            self._waiting.discard(waiting)
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._ended.set)
            raise
        self._loop.call_soon_threadsafe(begin)
        self._calls.put(None)
        return waiting, cancel

    def soon(self, work: Callable[[], object]) -> None:
        """Do a little work that belongs to the loop, now if nobody runs it, else there. From any thread, a finalizer
        too; never blocks."""
        if self._turn.acquire(blocking=False):
            try:
                work()
            finally:
                self._turn.release()
        else:
            with suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(work)
                self._calls.put(None)  # the turn may be ending; then the keeper does it

    def _keep(self) -> None:
        while not self._loop.is_closed():
            self._calls.get()
            with self._turn:
                self._selector.polls = False
                self._loop.run_until_complete(self._while_needed())
                if not self._open and not self._waiting:
                    self._loop.close()

    async def _while_needed(self) -> None:
        await asyncio.sleep(0)  # what `soon` left
        while self._waiting or self.busy():
            self._ended.clear()
            await self._ended.wait()

    def _check(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        if not self._open:
            coroutine.close()
            raise Closed("the plane is closed")

    def close(self) -> None:
        """End the keeper and the loop, once all that was handed over has ended; see to it that it does. Idempotent."""
        self._open = False
        self._calls.put(None)
        self._keeper.join()
