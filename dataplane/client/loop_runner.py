"""An event loop for blocking callers: a thread that waits for a result runs the loop itself.

Handing a call to a loop in another thread and back needs two wake-ups, 100 to 200 microseconds. So a thread that calls
while the loop does not run takes the turn, and runs the loop until its call is done (leader and followers, Schmidt et
al. 2000). A thread that calls during another thread's turn hands its coroutine over and waits. Afterwards, a background
thread has the turn as long as any thread waits or `busy` returns true.

Invariants: one thread at a time runs the loop. A coroutine that was handed over is run to its end, also after the
thread with the turn leaves. A call that is interrupted (Ctrl-C, or an error of a handler of SIGTERM or SIGALRM) is
cancelled; other work of the loop is not. At whatever moment an interrupt comes, the turn is released, and released
once.

Rejected: waiting for a `concurrent.futures.Future`. An interrupt within its condition leaves the condition locked, so
that the loop waits forever.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the functions of `signal` make enums, 20 microseconds a call
import asyncio
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from dataplane.client.connection import Exchange
from dataplane.diagnosis import recorder
from dataplane.errors import Closed, Misuse
from dataplane.wire.polling import BLOCK_S, PollingSelector, polling_loop

T = TypeVar("T")
_clock = time.monotonic_ns

WITHIN = "a plane was used within a call of it, by a finalizer or a signal's handler; it would wait forever"
_ALONE_S = 0.02
"""Seconds for which a call waits for its answer outside of the loop. Timers of the loop may be late by as much."""


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
"""The signals whose handlers often raise: for Ctrl-C, an orderly end, and a timeout."""


class _Interrupts:
    """A context manager in which an error of a handler of `_SIGNALS` (such as KeyboardInterrupt) cancels the main
    thread's call between two steps of the loop.

    If the block ends by the cancellation, it raises the handler's error. If it ends in another way, the signal came too
    late, and `late` is called with its number. In other threads, and within another such block, this does nothing.
    """

    __slots__ = ("_before", "_cancel", "_error", "_late", "_number", "_over")

    def __init__(self, late: Callable[[int], object]) -> None:
        self._late = late
        self._before: dict[int, Any] = {}  # by signal, the handler that this object replaces
        self._error: BaseException | None = None
        self._number = 0
        self._over = False  # from then on, the handlers raise as without this object
        self._cancel: Callable[[], object] | None = None

    def __enter__(self) -> _Interrupts:
        if threading.current_thread() is threading.main_thread():
            try:
                for number in _SIGNALS:
                    self._replace(number)
            except BaseException:  # of a handler that is not replaced yet
                self._put_back()
                raise
        return self

    def _replace(self, number: int) -> None:
        before = _signal.getsignal(number)
        if isinstance(before, _Interrupts):
            before = before._before[number] if before._over else None
        if callable(before):
            self._before[number] = before
            _signal.signal(number, self)

    def _put_back(self) -> None:
        self._over = True
        for number, before in self._before.items():
            found = _signal.signal(number, before)  # also runs the handlers of pending signals
            if found is not self:  # the previous handler has set another handler, which stays
                _signal.signal(number, found)

    def __call__(self, number: int, frame: Any) -> None:
        if self._over:
            self._before[number](number, frame)
            return
        try:
            self._before[number](number, frame)
        except BaseException as error:
            self._number = number
            self._error = error.with_traceback(None)  # breaks the cycle of traceback and this object
            if self._cancel is not None:
                self._cancel()

    def cancel_by(self, cancel: Callable[[], object] | None) -> None:
        """Set the function that cancels, and call it at once if a handler has failed already. None: cancel no more."""
        self._cancel = cancel
        if cancel is not None and self._error is not None:
            cancel()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self._before:
            return
        try:
            self._put_back()
        except BaseException:  # of a handler that is in its place again
            self._put_back()
            raise
        error, self._error = self._error, None
        if error is None:
            return
        try:
            if kind is asyncio.CancelledError:
                raise error from None
            self._late(self._number)
        finally:
            del error


class LoopRunner:
    """An event loop, and the turn (a lock) to run it. `close` ends both."""

    def __init__(self) -> None:
        self.busy: Callable[[], bool] = lambda: False
        """Returns whether the loop must run without a waiting thread. Called when a call ends."""
        self._selector = PollingSelector()
        self._loop = polling_loop(self._selector)
        self._turn = threading.RLock()  # knows its owner at every moment, also during `acquire`
        self._run_for: Coroutine[Any, Any, Any] | None = None  # the coroutine of the thread with the turn
        self._waiting: set[object] = set()  # changed by atomic operations, so that any thread may change it
        self._ended = asyncio.Event()
        self._open = True
        self._calls: queue.SimpleQueue[None] = queue.SimpleQueue()  # reentrant, because finalizers put into it
        self._thread = threading.Thread(target=self._keep, name="dataplane", daemon=True)
        self._thread.start()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine. Returns its result, or raises its error. Any thread may call this. If the thread runs
        another event loop (as in notebooks), that loop is blocked meanwhile. Raises Misuse in a finalizer or a signal
        handler that runs within another call.
        """
        entered = recorder.enter()
        try:
            return self._wait(coroutine)
        finally:
            recorder.leave(entered)

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self.within:
            coroutine.close()
            raise Misuse(WITHIN)
        with _Interrupts(self._interrupt_later) as interrupts:
            if asyncio._get_running_loop() is not None or not self._turn.acquire(blocking=False):
                return self._hand_over(coroutine, interrupts)
            try:
                self._check(coroutine)
                return self._lead(coroutine, interrupts)
            finally:
                self._release()

    @property
    def within(self) -> bool:
        """Whether this thread has the turn. Code that runs then, such as a finalizer, must not wait for a result."""
        return self._turn._is_owned()  # type: ignore[attr-defined, no-any-return]  # `threading.Condition` uses it too

    @property
    def free(self) -> bool:
        """Whether no thread runs the loop at this moment, and this thread may call `ask`."""
        return not self._loop.is_running() and not self.within

    def ask(self, exchange: Exchange[Any, T]) -> T:
        """Do an exchange. Returns its result. Must not be called `within` another call. If the loop has no other work,
        this thread sends the request and reads the answer without the loop, because a task takes longer than the
        request. If other events come first, or no answer comes within `_ALONE_S`, the loop completes the exchange."""
        began = _clock()
        try:
            return self._ask(exchange, began)
        finally:
            recorder.called(exchange.request.id, began)

    def _ask(self, exchange: Exchange[Any, T], began: int) -> T:
        exchange.connection.check()  # checked first, because a forked child must not use the turn
        if self._waiting or asyncio._get_running_loop() is not None:
            with recorder.within(exchange.request.id):
                return self._wait(exchange.connection.exchange(exchange))
        with _Interrupts(self._interrupt_later) as interrupts:
            if not self._turn.acquire(blocking=False):
                with recorder.within(exchange.request.id):
                    return self._hand_over(exchange.connection.exchange(exchange), interrupts)
            try:
                if not self._open:
                    raise Closed("the plane is closed")
                self._selector.polls = True
                made, rest = exchange.connection.exchange_now(exchange, self._alone, began)
                if rest is None:
                    return made  # type: ignore[return-value]
                with recorder.within(exchange.request.id):
                    return self._lead(rest, interrupts)
            finally:
                self._release()

    def _alone(self, descriptor: int) -> bool:
        """Wait up to `_ALONE_S`. Returns whether only this socket is readable, and no thread has work for the loop."""
        return not self._waiting and self._selector.only(descriptor, _ALONE_S)

    def _release(self) -> None:
        self._turn.release()
        if self.busy():
            self._calls.put(None)

    def _lead(self, coroutine: Coroutine[Any, Any, T], interrupts: _Interrupts) -> T:
        """Run the loop until the coroutine has ended. Returns its result. The caller has the turn."""
        self._selector.polls = True
        self._run_for = coroutine
        task = self._loop.create_task(self._last(coroutine))
        try:
            self._run(task, interrupts)
            return task.result()
        finally:
            del task  # break the cycle of error and task, which would keep the arguments of the call

    def _run(self, task: asyncio.Task[Any], interrupts: _Interrupts) -> None:
        """Run the loop until the task has ended. Does not raise the task's error. If a signal handler raises, its error
        is raised, the task is cancelled, and the background thread runs it to its end."""
        try:
            # Cancelled between two steps of the loop, not within one.
            interrupts.cancel_by(lambda: self._loop.call_soon_threadsafe(task.cancel))
            self._loop.run_forever()
        except BaseException:
            self._waiting.add(task)
            task.add_done_callback(lambda _: self._has_ended(task, task))
            self._loop.call_soon(task.cancel)
            self._calls.put(None)
            raise
        finally:
            interrupts.cancel_by(None)
            self._run_for = None

    async def _last(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine, and stop the loop in the same step. A callback of the task would stop it a step later."""
        try:
            return await coroutine
        finally:
            if self._run_for is coroutine:  # if not, an error has ended this turn, and another thread may have it
                self._loop.stop()

    def _hand_over(self, coroutine: Coroutine[Any, Any, T], interrupts: _Interrupts) -> T:
        """Let the thread with the turn run the coroutine, and wait for its result. If a signal handler raises, the
        coroutine is cancelled, without waiting for its end."""
        begun: list[asyncio.Task[T]] = []
        done = threading.Lock()  # not a condition, which an error of a signal handler may leave locked
        done.acquire()

        def cancel() -> None:
            with suppress(RuntimeError):  # it has ended, and the loop is closed
                self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in begun])
                self._calls.put(None)

        try:
            self._begin(coroutine, begun, done.release)
            interrupts.cancel_by(cancel)
            while not done.acquire(timeout=BLOCK_S):
                pass
        except BaseException:
            cancel()
            raise
        finally:
            interrupts.cancel_by(None)
        return begun.pop().result()  # not left in `begun`, to break the same cycle as in `_lead`

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Let the thread that runs the loop run the coroutine to its end, without waiting. May be called from any
        thread. Raises Closed."""
        self._begin(coroutine, [], lambda: None)

    def _begin(
        self, coroutine: Coroutine[Any, Any, T], begun: list[asyncio.Task[T]], done: Callable[[], object]
    ) -> None:
        """Let the thread with the turn run the coroutine as a task, put the task into `begun`, and call `done` at its
        end. Raises Closed."""
        waiting = object()

        def ended(task: asyncio.Task[T]) -> None:  # also called if the task was cancelled before it began
            self._has_ended(waiting, task)
            done()

        def begin() -> None:
            begun.append(self._loop.create_task(coroutine))
            begun[0].add_done_callback(ended)

        # Added before the check that the loop is open, so that the background thread sees it, or the check raises.
        self._waiting.add(waiting)
        try:
            self._check(coroutine)
            self._loop.call_soon_threadsafe(begin)
        except BaseException:
            self._waiting.discard(waiting)
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._ended.set)
            raise
        self._calls.put(None)

    def _has_ended(self, waiting: object, task: asyncio.Task[Any]) -> None:
        self._waiting.discard(waiting)
        self._ended.set()
        if not task.cancelled():
            task.exception()  # mark the error as retrieved, even if no thread waits any more

    def _interrupt_later(self, number: int) -> None:
        """Handle a signal that came after the call had ended. The error of its handler must not be lost, and must not
        discard the call's result. So the loop sends the signal again, in another thread or in the next call."""
        try:
            self._loop.call_soon_threadsafe(os.kill, os.getpid(), number)
            self._calls.put(None)
        except RuntimeError:  # closed
            os.kill(os.getpid(), number)

    def soon(self, work: Callable[[], object]) -> None:
        """Do short work that needs the turn: now if no thread has the turn, else in the loop. May be called from any
        thread, and from a finalizer. Never blocks."""
        with _Interrupts(self._interrupt_later):
            if not self.within and self._turn.acquire(blocking=False):
                try:
                    work()
                finally:
                    self._turn.release()
            else:
                with suppress(RuntimeError):  # closed meanwhile
                    self._loop.call_soon_threadsafe(work)
                    self._calls.put(None)  # if the turn ends now, the background thread does the work

    def _keep(self) -> None:
        while not self._loop.is_closed():
            self._calls.get()
            with self._turn:
                self._selector.polls = False
                self._loop.run_until_complete(self._while_needed())
                if not self._open and not self._waiting:
                    self._loop.close()

    async def _while_needed(self) -> None:
        await asyncio.sleep(0)  # scheduled by `soon`
        while self._waiting or self.busy():
            self._ended.clear()
            await self._ended.wait()

    def _check(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        if not self._open:
            coroutine.close()
            raise Closed("the plane is closed")

    def end(self) -> None:
        """Let the background thread and the loop end once all coroutines that were handed over have ended. May be
        called from any thread, and from a finalizer. Idempotent."""
        self._open = False
        self._calls.put(None)

    def close(self) -> None:
        """`end`, and wait for the end. The caller must ensure that the coroutines end."""
        self.end()
        self._thread.join()
