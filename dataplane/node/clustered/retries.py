"""Repeats requests to the coordinator until it answers, for at most `PATIENCE_S`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from dataplane.clock import Deadline
from dataplane.coordinator.base import Unavailable
from dataplane.errors import OutcomeUnknown, PeerUnavailable

T = TypeVar("T")

PATIENCE_S = 12.0
"""How long requests to a silent coordinator are repeated."""

_PAUSE_S = 0.2


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
