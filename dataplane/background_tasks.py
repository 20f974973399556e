"""Background tasks of an owner: their errors are logged, and the owner cancels them when it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from dataplane.log_lines import error_line

log = logging.getLogger(__name__)


class BackgroundTasks:
    """The background tasks of one owner."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, object]) -> asyncio.Task[None]:
        """Run `work` as a task. Its errors are logged, and have no other effect."""
        task = asyncio.get_running_loop().create_task(_run(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # it may have been cancelled before it began
        return task

    async def join(self, timeout_s: float | None = None) -> None:
        """Wait until the currently running tasks have ended, for a limited time. Cancels none."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def cancel(self) -> None:
        """Cancel all tasks, without waiting for their ends. Needs no running event loop."""
        for task in self._tasks:
            task.cancel()

    async def aclose(self) -> None:
        """Cancel all tasks except the calling one, and wait until they have ended. Idempotent."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(work: Coroutine[Any, Any, object]) -> None:
    try:
        await work
    except Exception as error:
        log.error("a background task failed: %s", error_line(error))
        log.debug("traceback of the error above", exc_info=error)
