"""Waits for several requests at once, and repeats requests to the coordinator until it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from dataplane.clock import Deadline
from dataplane.coordinator.base import Unavailable
from dataplane.errors import OutcomeUnknown, PeerUnavailable

T = TypeVar("T")

PATIENCE_S = 12.0
"""How long requests to a silent coordinator are repeated."""

_PAUSE_S = 0.2


async def all_of(asked: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All answers. If some fail, raises the first error once all have ended."""
    if len(asked) == 1:
        return [await asked[0]]
    found = await asyncio.gather(*asked, return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found  # type: ignore[return-value]


async def ended(asked: Iterable[Coroutine[Any, Any, None]], *, first: bool, timeout_s: float | None = None) -> None:
    """Wait until all have ended or, with `first`, until one has. At that time, or at the timeout, the others are
    cancelled. Raises the error of one that failed."""
    tasks = [asyncio.ensure_future(each) for each in asked]
    try:
        how = asyncio.FIRST_COMPLETED if first else asyncio.ALL_COMPLETED
        done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=how)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def patiently(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Repeat `work`, which sends a request to the coordinator, until the coordinator answers. If it does not, raises
    PeerUnavailable, or OutcomeUnknown if a change may have reached it."""
    deadline = Deadline.after(PATIENCE_S)
    unanswered = False
    while True:
        try:
            return await work()
        except (Unavailable, OutcomeUnknown) as error:
            unanswered = unanswered or isinstance(error, OutcomeUnknown)
            if not deadline.remaining_s:
                kind = OutcomeUnknown if unanswered else PeerUnavailable
                raise kind(f"the cluster's coordinator does not answer: {error}") from error
            await asyncio.sleep(_PAUSE_S)
