"""Threads for work that may hang: a disk that does not answer can block a thread for an unlimited time.

Invariants:

- every thread is started with the workers, so none can be missing later;
- at most `slots` pieces of work run at once, except for late ones: a piece without progress for a while keeps its
  thread and gives its slot to an idle thread, so that later work goes on;
- if every thread is late, new and waiting work is refused at once (OSError, ETIMEDOUT);
- late threads are not waited for when the workers are closed, nor when the process ends.

Rejected: `ThreadPoolExecutor`, which starts threads on demand, keeps the work in its queue if a start fails, and whose
threads the interpreter joins before it ends.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

LATE_S = 1.0
"""Seconds without progress after which work is late."""


class _Piece:
    """A piece of work, and the future of its result."""

    __slots__ = ("args", "future", "kwargs", "work")

    def __init__(self, work: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.future: Future[Any] = Future()
        self.work = work
        self.args = args
        self.kwargs = kwargs

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.work(*self.args, **self.kwargs)
        except MemoryError:
            self.future.set_exception(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class Workers(Executor):
    """See the module. Call `relieve` periodically while work is pending: only it detects late work."""

    def __init__(self, slots: int, spares: int, name: str) -> None:
        """Raises OSError if the system starts no thread."""
        self._name = name
        self._work: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()  # for a spare: take a slot (True), or end
        self._lock = threading.Lock()
        self._progress: dict[int, float] = {}  # by working thread, the time of its last progress
        self._replaced: set[int] = set()  # late threads whose slot a spare has
        self._spares = spares
        self._stuck = False
        self._closed = False
        self._threads: list[threading.Thread] = []
        try:
            for i in range(slots + spares):
                thread = threading.Thread(target=self._live, args=(i >= slots,), name=f"{name}_{i}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError:
            self.close(LATE_S)
            why = "no thread can be started: raise the limit of processes (ulimit -u), or of tasks (pids.max)"
            raise OSError(errno.EAGAIN, why) from None

    def submit(self, work: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run the work in a thread. Raises OSError if all threads are late, and after `close`."""
        if self._closed:
            raise OSError(errno.ESHUTDOWN, "the node stops")
        if self._stuck:
            raise self._no_answer()
        piece = _Piece(work, args, kwargs)
        self._work.put(piece)
        if self._closed:  # meanwhile
            piece.future.cancel()
        return piece.future

    def _no_answer(self) -> OSError:
        return OSError(errno.ETIMEDOUT, f"{len(self._progress)} requests to the system have not been answered")

    def progress(self) -> None:
        """Record progress of this thread's work."""
        with self._lock:
            self._progress[threading.get_ident()] = time.monotonic()

    def relieve(self, late_s: float = LATE_S) -> None:
        """Give the slots of late threads to idle ones. If no idle thread is left, refuse the waiting work."""
        with self._lock:
            before = time.monotonic() - late_s
            late = [thread for thread, since in self._progress.items() if since <= before]
            for thread in late:
                if thread not in self._replaced and self._spares:
                    self._spares -= 1
                    self._replaced.add(thread)
                    self._calls.put(True)
            self._stuck = len(late) == len(self._threads)
        if self._stuck:
            self._refuse(self._no_answer())

    @property
    def late(self) -> int:
        """The number of threads that have lost their slot."""
        return len(self._replaced)

    def _refuse(self, error: OSError) -> None:
        with suppress(queue.Empty):
            while True:
                piece = self._work.get_nowait()
                if piece is not None and piece.future.set_running_or_notify_cancel():
                    piece.future.set_exception(error)

    def _live(self, spare: bool) -> None:
        me = threading.get_ident()
        while True:
            if spare and not self._calls.get():
                return
            spare = False
            piece = self._work.get()
            if piece is None:
                return
            with self._lock:
                self._progress[me] = time.monotonic()
            piece.run()
            del piece  # else this thread would keep its arguments alive
            with self._lock:
                del self._progress[me]
                self._stuck = False
                if me in self._replaced:
                    self._replaced.discard(me)
                    self._spares += 1
                    spare = True

    @property
    def ended(self) -> bool:
        """Whether all threads have ended."""
        return not any(thread.is_alive() for thread in self._threads)

    def close(self, patience_s: float) -> None:
        """Cancel work that has not begun, and wait at most `patience_s` for running work."""
        self._closed = True
        with suppress(queue.Empty):
            while True:
                piece = self._work.get_nowait()
                if piece is not None:
                    piece.future.cancel()
        for _ in self._threads:
            self._work.put(None)
            self._calls.put(False)
        until = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
