"""Work shared among threads, and waiting for threads that write into memory which is about to be somebody else's."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_HELPERS = 4


def together(pool: Executor, work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """As `list(map(work, items))`, by this thread and those of `pool` that are idle: it waits for none that is not, so
    it may run in the pool itself. No work is running any more when this returns or raises."""
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
    with suppress(RuntimeError):  # a pool that is being shut down helps no more
        for _ in range(min(_HELPERS, len(left) - 1)):
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
    """Cancel what has not started, and wait for what has, even if this is cancelled meanwhile; for so long at most."""
    until = None if patience_s is None else time.monotonic() + patience_s
    for future in running:
        future.cancel()
    # Futures of our own: cancelling those that were waited for before has marked them done, and stopped no thread.
    left = [asyncio.wrap_future(future) for future in running if not future.done()]
    while left and (until is None or time.monotonic() < until):
        with suppress(asyncio.CancelledError):
            await asyncio.wait(left, timeout=None if until is None else max(0.0, until - time.monotonic()))
        for ended in left:
            if ended.done() and not ended.cancelled():
                ended.exception()  # who waited first has been told
        left = [future for future in left if not future.done()]
