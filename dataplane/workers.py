"""Threads for work that may hang: a disk that does not answer holds up a thread for as long as it likes.

Invariants:

- every thread is started when the workers are made, so that later none can be missing;
- at most `slots` pieces of work run at once, but for those that are late: a piece that has made no progress for a while
  keeps its thread and gives its slot to an idle thread, so that what comes after it goes on;
- where every thread is late, work is refused at once (OSError, ETIMEDOUT), and what was waiting is too;
- nobody waits for a late thread when the workers are closed, nor when the process ends.

Rejected: `ThreadPoolExecutor`, which starts threads as work comes, keeps the work in its queue where that fails, and
whose threads the interpreter joins before it ends.
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
    """Work, and who waits for it."""

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
    """See the module. `relieve` must be called now and then while there is work: nobody else notices what is late."""

    def __init__(self, slots: int, spares: int, name: str) -> None:
        """Raises OSError where the system starts no thread."""
        self._name = name
        self._work: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()  # for a spare: whether to take a slot, or to end
        self._lock = threading.Lock()
        self._progress: dict[int, float] = {}  # of each thread that works, when it last made any
        self._replaced: set[int] = set()  # threads that are late, whose slot a spare has
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
        """Have it done by a thread. Raises OSError where all of them are late, and once closed."""
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
        """The work of this thread goes on."""
        with self._lock:
            self._progress[threading.get_ident()] = time.monotonic()

    def relieve(self, late_s: float = LATE_S) -> None:
        """Give the slots of late threads to idle ones. Where there is none left, refuse what waits."""
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
        """How many threads have lost their slot."""
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
            del piece  # this thread must not keep alive what it refers to
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
        """Cancel what has not begun, and wait for so long for what has."""
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
