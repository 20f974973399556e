"""What errors of a group of tasks leave to be done by hand."""

from __future__ import annotations

import asyncio


def check_cancelled() -> None:
    """Raises CancelledError where this task has been cancelled: a group whose tasks failed meanwhile does not."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error in a group of errors and groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
