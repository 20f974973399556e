"""Closes several objects in order."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable


async def close_each(*closes: Callable[[], object], within_s: float | None = None) -> None:
    """Make each of these calls, in order, and await its result. If one raises, hangs or is cancelled, the others are
    still made.

    within_s: seconds for all calls together; then the waiting call is cancelled; each later call runs until it first
        waits, and is then cancelled.

    Raises the first error at the end, with the others as its notes: TimeoutError for a call that was cancelled because
    of `within_s`. If the caller is cancelled, CancelledError comes before other errors.
    """
    deadline = None if within_s is None else asyncio.get_running_loop().time() + within_s
    errors: list[BaseException] = []
    for close in closes:
        try:
            async with asyncio.timeout_at(deadline):
                closing = close()
                if inspect.isawaitable(closing):
                    await closing
        except BaseException as error:  # raised below
            errors.append(error)
    if errors:
        first = min(errors, key=lambda error: not isinstance(error, asyncio.CancelledError))
        for other in errors:
            if other is not first:
                first.add_note(f"closing failed too: {other!r}")
        raise first
