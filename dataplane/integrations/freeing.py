"""Frees stored values when their tensors and handles in this process are gone.

Finalizers notice that. They run at any point, also within a call to the plane or during garbage collection, so they
only add an entry to a queue that may be used there (`queue.SimpleQueue`), and a thread of this module frees the
entries.

Invariants: a value is not freed while it is used in this process. The values of a node that has ended need not be
freed.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from dataplane.batch.ref import BatchRef
from dataplane.errors import DataplaneError
from dataplane.integrations.process import plane as plane_of_process

_queue: SimpleQueue[BatchRef | threading.Event] = SimpleQueue()
_starting = threading.Lock()
_runs_in = 0  # the process that has the thread


class Watch:
    """Frees `ref` once all of `users` are gone."""

    def __init__(self, ref: BatchRef, users: Iterable[Any]) -> None:
        _start()
        self._ref = ref
        self._made_in = os.getpid()
        held = list(users)
        self._left: list[None] = [None] * len(held)
        self._finalizers = [weakref.finalize(user, self._gone) for user in held]
        for finalizer in self._finalizers:
            finalizer.atexit = False

    @property
    def active(self) -> bool:
        """Whether it will free something."""
        return any(finalizer.alive for finalizer in self._finalizers)

    def cancel(self) -> None:
        """Leave the value to another owner. Idempotent."""
        for finalizer in self._finalizers:
            finalizer.detach()

    def _gone(self) -> None:
        self._left.pop()  # at once, whichever threads lose users at the same time
        if not self._left and self._made_in == os.getpid():  # the parent of a forked child still has them
            _queue.put(self._ref)


def settle(timeout: float = 30.0) -> bool:
    """Wait until all entries of the queue are freed. Returns False if the timeout was reached before."""
    done = threading.Event()
    _start()
    _queue.put(done)
    return done.wait(timeout)


def _start() -> None:
    global _runs_in
    with _starting:
        if _runs_in != os.getpid():  # a forked child has no threads
            _runs_in = os.getpid()
            threading.Thread(target=_run, name="dataplane-freeing", daemon=True).start()


def _run() -> None:
    while True:
        noted = _queue.get()
        if isinstance(noted, threading.Event):
            noted.set()
            continue
        with suppress(DataplaneError):  # its node has gone, and it with that
            plane_of_process().free(noted)
        del noted
