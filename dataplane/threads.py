"""Waiting for threads that write into memory which is about to be somebody else's."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any


async def stopped(running: Sequence[Future[Any]]) -> None:
    """Cancel what has not started, and wait for what has, even if this is cancelled meanwhile."""
    for future in running:
        future.cancel()
    # Futures of our own: cancelling those that were waited for before has marked them done, and stopped no thread.
    left = [asyncio.wrap_future(future) for future in running if not future.done()]
    while left:
        with suppress(asyncio.CancelledError):
            await asyncio.wait(left)
        for ended in left:
            if ended.done() and not ended.cancelled():
                ended.exception()  # who waited first has been told
        left = [future for future in left if not future.done()]
