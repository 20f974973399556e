"""Pools of threads; work shared among them; and waits for threads that write into memory which is about to be
reused."""

from __future__ import annotations

import asyncio
import errno
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_HELPERS = 4


class Pool(Executor):
    """At most `most` threads. Invariants: work for which the system starts no thread is refused (OSError) and not done
    later; hanging threads are not waited for when the process ends. `ThreadPoolExecutor` keeps such work in its queue,
    and the interpreter joins its threads."""

    def __init__(self, most: int, name: str, *, storage: bool = False) -> None:
        """Threads are started on demand. `storage`: all are started now, so that none can be missing later, and a
        MemoryError of their work is raised as OSError. Raises OSError then, if the system starts too few."""
        self._most = most
        self._name = name
        self._storage = storage
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], None]] | None] = queue.SimpleQueue()
        self._free = 0  # idle threads, less the pieces of work that wait for one
        self._threads: list[threading.Thread] = []
        self._ended: list[Future[None]] = []
        self._closed = False
        try:
            for _ in range(most if storage else 0):
                self._start(lambda: None)
        except OSError:
            self.shutdown()
            raise

    def submit(self, work: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Run the work in a thread. Raises OSError if none exists and none can be started, and after `shutdown`."""
        future: Future[R] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    result = work(*args, **kwargs)
                except BaseException as error:
                    if self._storage and isinstance(error, MemoryError):
                        error = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
                    future.set_exception(error)
                else:
                    future.set_result(result)

        with self._lock:
            if self._closed:
                raise OSError(errno.ESHUTDOWN, "these threads have ended")
            if self._free <= 0 and len(self._threads) < self._most:
                self._start(run)
            else:
                self._free -= 1
                self._work.put((future, run))
        return future

    def _start(self, first: Callable[[], None]) -> None:
        ended: Future[None] = Future()
        ended.set_running_or_notify_cancel()  # so that a cancelled wait for it does not cancel it
        name = f"{self._name}_{len(self._threads)}"
        thread = threading.Thread(target=self._live, args=([first], ended), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            why = "no thread can be started: raise the limit of processes (ulimit -u), or of tasks (pids.max)"
            raise OSError(errno.EAGAIN, why) from None
        self._threads.append(thread)
        self._ended.append(ended)

    def _live(self, first: list[Callable[[], None]], ended: Future[None]) -> None:
        work: Callable[[], None] | None = first.pop()  # a thread keeps its arguments until it ends
        while work is not None:
            work()
            del work  # else this thread would keep its arguments alive
            with self._lock:
                self._free += 1
            waiting = self._work.get()
            work = None if waiting is None else waiting[1]
            del waiting
        ended.set_result(None)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False, patience_s: float | None = None) -> None:
        """Take no more work; with `wait`, wait for the accepted work, at most `patience_s` seconds if that is given.
        `cancel_futures`: cancel work that has not begun. Idempotent."""
        with self._lock:
            if cancel_futures:
                self._cancel()
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._work.put(None)
        until = None if patience_s is None else time.monotonic() + patience_s
        for thread in self._threads if wait else ():
            thread.join(None if until is None else max(0.0, until - time.monotonic()))

    @property
    def ended(self) -> bool:
        """Whether all threads have ended."""
        return not any(thread.is_alive() for thread in self._threads)

    def _cancel(self) -> None:
        """Cancel work that no thread has begun. Threads that were asked to end still end."""
        ends = 0
        with suppress(queue.Empty):
            while True:
                waiting = self._work.get_nowait()
                ends += waiting is None
                if waiting is not None:
                    waiting[0].cancel()
        for _ in range(ends):
            self._work.put(None)

    async def aclose(self) -> None:
        """Take no more work, and wait for the accepted work."""
        self.shutdown(wait=False)
        await asyncio.gather(*map(asyncio.wrap_future, self._ended))

    async def aside(self, work: Callable[..., R], *args: Any) -> R:
        """Run this in a thread; in the current one if no other is available."""
        try:
            running = self.submit(work, *args)
        except OSError:
            return work(*args)
        return await asyncio.wrap_future(running)


def together(pool: Executor, work: Callable[[T], R], items: Iterable[T], *, helpers: int = _HELPERS) -> list[R]:
    """As `list(map(work, items))`, by this thread and at most `helpers` idle threads of `pool`: it does not wait for
    busy threads, so it may also be called from a thread of `pool`. No work is running any more when this returns or
    raises."""
    left = deque(enumerate(items))
    found: dict[int, R] = {}

    def take() -> None:
        while True:
            try:
                i, item = left.popleft()
            except IndexError:
                return
            found[i] = work(item)

    helping: list[Future[None]] = []
    with suppress(RuntimeError, OSError):  # the pool is being shut down
        for _ in range(min(helpers, len(left) - 1)):
            helping.append(pool.submit(take))
    try:
        take()
    finally:
        left.clear()
        helping = [helper for helper in helping if not helper.cancel()]
        wait(helping)
    for helper in helping:
        helper.result()
    return [found[i] for i in range(len(found))]


async def stopped(running: Sequence[Future[Any]], patience_s: float | None = None) -> None:
    """Cancel work that has not started, and wait for running work, for a limited time, even if this is cancelled."""
    until = None if patience_s is None else time.monotonic() + patience_s
    for future in running:
        future.cancel()
    # New futures of asyncio: earlier ones that were cancelled are marked done, although their threads still run.
    left = [asyncio.wrap_future(future) for future in running if not future.done()]
    while left and (until is None or time.monotonic() < until):
        with suppress(asyncio.CancelledError):
            await asyncio.wait(left, timeout=None if until is None else max(0.0, until - time.monotonic()))
        for ended in left:
            if ended.done() and not ended.cancelled():
                ended.exception()  # the first waiter has raised it
        left = [future for future in left if not future.done()]
