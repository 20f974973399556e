"""Where the processes of a run are shortly before its time is over: who waits for what. A file a process.

A run that hangs does so in several processes at once, and is ended from outside; so each has a thread that waits for
the moment that the run was told of (`FIT_DEADLINE`, seconds of `time.time()`), and writes then. A run that ends before
it leaves no files.
"""

from __future__ import annotations

import asyncio
import gc
import linecache
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

_FRAMES = 8  # of a stack, the innermost
_STANDARD = sysconfig.get_path("stdlib"), "<frozen"


def watch(directory: Path, deadline: float) -> threading.Thread:
    """Begin the thread that writes to `directory / <pid>` at the deadline."""
    thread = threading.Thread(target=_write, args=(directory, deadline), daemon=True, name="hang")
    thread.start()
    return thread


def watch_if_asked() -> None:
    """Do so where the environment says when, and where to."""
    if "FIT_DEADLINE" in os.environ:
        watch(Path(os.environ["FIT_HANG"]), float(os.environ["FIT_DEADLINE"]))


def said(directory: Path) -> str:
    """What all of them wrote."""
    return "\n".join(path.read_text() for path in sorted(directory.glob("*")))


def _write(directory: Path, deadline: float) -> None:
    time.sleep(max(0.0, deadline - time.time()))
    title = Path("/proc/self/cmdline").read_text().replace("\0", " ")[:100]
    lines = [f"{os.getpid()} {title.strip()}", *_threads(), *_tasks()]
    directory.mkdir(exist_ok=True)
    (directory / str(os.getpid())).write_text("\n  ".join(lines))


def _threads() -> Iterator[str]:
    """The stack of each thread that is in code of somebody's own."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for number, innermost in sys._current_frames().items():
        stack: list[FrameType] = []
        frame: FrameType | None = innermost
        while frame is not None:
            stack.append(frame)
            frame = frame.f_back
        if number != threading.get_ident() and (told := _told(stack)):
            yield f"thread {names.get(number, number)}: {told}"


def _tasks() -> Iterator[str]:
    """What each task of each event loop awaits, from the inside."""
    for task in [each for each in gc.get_objects() if issubclass(type(each), asyncio.Task)]:  # asyncio tells one loop's
        awaited: Any = task.get_coro()
        stack: list[FrameType] = []
        while (frame := getattr(awaited, "cr_frame", None)) is not None:
            stack.append(frame)
            awaited = awaited.cr_await
        if not task.done() and (told := _told(stack[::-1])):
            yield f"task {task.get_name()}: {told}; awaits {type(awaited).__name__} {str(awaited)[:100]}"


def _told(stack: list[FrameType]) -> str:
    """Frames, the innermost first, without the standard library's."""
    return " < ".join([_line(frame) for frame in stack if not _is_standard(frame.f_code.co_filename)][:_FRAMES])


def _is_standard(path: str) -> bool:
    return path.startswith(_STANDARD) and "site-packages" not in path


def _line(frame: FrameType) -> str:
    path, number = frame.f_code.co_filename, frame.f_lineno
    short = "/".join(Path(path).parts[-2:])
    return f"{short}:{number} {frame.f_code.co_name} `{linecache.getline(path, number).strip()[:80]}`"
