"""Where the processes of a run are shortly before its time is over: who waits for what. A file a process.

A run that hangs does so in several processes at once, and is ended from outside; so each has a thread that waits for
the moment that the run was told of (`FIT_DEADLINE`, seconds of `time.time()`), and writes then. A run that ends before
it leaves no files.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import threading
import time
from pathlib import Path
from typing import Any


def watch_if_asked() -> None:
    """Begin the thread, where the environment says when, and where to."""
    if "FIT_DEADLINE" in os.environ:
        threading.Thread(target=_write, daemon=True, name="hang").start()


def said(directory: Path) -> str:
    """What all of them wrote."""
    return "\n".join(path.read_text() for path in sorted(directory.glob("*")))


def _write() -> None:
    time.sleep(max(0.0, float(os.environ["FIT_DEADLINE"]) - time.time()))
    directory = Path(os.environ["FIT_HANG"])
    directory.mkdir(exist_ok=True)
    with (directory / str(os.getpid())).open("w") as file:
        print(os.getpid(), Path("/proc/self/cmdline").read_text().replace("\0", " ")[:100], file=file, flush=True)
        faulthandler.dump_traceback(file)
        for task in [each for each in gc.get_objects() if issubclass(type(each), asyncio.Task)]:  # of all loops
            print(f"task {task.get_name()}:", *_awaits(task.get_coro()), sep="\n  ", file=file)


def _awaits(awaited: Any) -> list[str]:
    """What a task awaits, from the outside."""
    found = []
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        awaited = awaited.cr_await
    return [*found, str(awaited)[:100]]
