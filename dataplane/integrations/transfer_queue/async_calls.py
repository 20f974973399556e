"""The asynchronous twins: each runs its synchronous call in a thread, so that any event loop can await it.

Calls wait in pools of their own, so that a thread is free for the call for which they wait: fetches wait for puts, and
puts wait for clears, which make room. A call that is cancelled is executed anyway.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_THREADS = {"calls": 8, "puts": 8, "waits": 64}

_lock = threading.Lock()
_pools: dict[str, ThreadPoolExecutor] = {}
_pid = 0


def twin(call: Callable[P, T], pool: str = "calls") -> Callable[P, Coroutine[Any, Any, T]]:
    """The call as a coroutine function. pool: see `executor`."""

    @wraps(call)
    async def awaited(*args: P.args, **kwargs: P.kwargs) -> T:
        return await run(partial(call, *args, **kwargs), pool)

    awaited.__name__ = f"async_{call.__name__}"
    awaited.__qualname__ = call.__qualname__.replace(call.__name__, awaited.__name__)
    return awaited


async def run(call: Callable[[], T], pool: str = "calls") -> T:
    """Run it in a thread of the pool."""
    return await asyncio.get_running_loop().run_in_executor(executor(pool), call)


def executor(name: str) -> ThreadPoolExecutor:
    """The pool of threads: "puts" for puts, which may wait for room, "waits" for calls that may wait for puts, "calls"
    for all others."""
    global _pid
    with _lock:
        if _pid != os.getpid():  # a forked child has none of the threads
            _pid = os.getpid()
            _pools.clear()
        if name not in _pools:
            _pools[name] = ThreadPoolExecutor(_THREADS[name], thread_name_prefix=f"dataplane-transfer-queue-{name}")
        return _pools[name]


def end() -> None:
    """End the threads after their current calls. Idempotent; they start again when needed."""
    with _lock:
        pools = list(_pools.values()) if _pid == os.getpid() else []
        _pools.clear()
    for pool in pools:
        pool.shutdown()
