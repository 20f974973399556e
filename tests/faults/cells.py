"""Calls into the operating system, what each can fail with, and of what.

A cell is a call, an errno, which of its occurrences fails, and what it is about. Errors that the kernel never returns
for a call are not among them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from errno import (
    EACCES,
    EAGAIN,
    ECONNABORTED,
    ECONNRESET,
    EINTR,
    EINVAL,
    EIO,
    EMFILE,
    ENFILE,
    ENOBUFS,
    ENOMEM,
    ENOSPC,
    EPERM,
    EROFS,
)

from tests.faults.shim import EVERY, HANG, name

SPILL, SOCKET, MEMORY = ".spill", "socket:", "memfd:dataplane"

OCCURRENCES = {"first": (1, 1), "second": (2, 1), "fifth": (5, 1), "every": (1, EVERY)}


@dataclass(frozen=True, slots=True)
class Cell:
    """One fault. `disk`: of the disk alone, so that whoever needs no disk goes on meanwhile. `fresh`: of what a node
    does once for a client or a segment, so that it needs one that has done nothing yet. `slow`: whoever asks hears
    nothing, and waits until it gives up."""

    call: str
    error: int
    occurrence: str
    target: str
    disk: bool = False
    fresh: bool = False

    @property
    def slow(self) -> bool:
        return self.occurrence == "every" and self.call in _UNANSWERED

    def __str__(self) -> str:
        return f"{self.call}-{name(self.error)}-{self.occurrence}"


_DISK = {
    "open": (EIO, ENOSPC, EROFS, EMFILE, ENFILE, ENOMEM, EACCES, EAGAIN, EINTR, HANG),
    "write": (EIO, ENOSPC, EROFS, EINTR, EAGAIN, HANG),
    "read": (EIO, ENOMEM, EINTR, HANG),
    "unlink": (EIO, EROFS, EPERM, HANG),
    "close": (EIO, ENOSPC, EINTR),
    "fstat": (EIO, ENOMEM, HANG),
}
_OTHERS = {
    ("mmap", "anonymous"): (ENOMEM,),
    ("pthread_create", ""): (EAGAIN,),
    ("madvise", ""): (EINVAL, ENOMEM, EAGAIN),
    ("accept", SOCKET): (EMFILE, ENFILE, ENOMEM, ENOBUFS, ECONNABORTED, EINTR, EAGAIN),
    ("getsockopt", SOCKET): (ENOMEM, ENOBUFS),
    ("epoll_ctl", ""): (ENOSPC, ENOMEM),
    ("send", SOCKET): (EAGAIN, EINTR, ENOMEM, ENOBUFS),
    ("sendmsg", SOCKET): (EAGAIN, EINTR, ENOMEM, ENOBUFS),
    ("recv", SOCKET): (EAGAIN, EINTR, ENOMEM, ECONNRESET),
}
_SEGMENTS = {
    ("mmap", MEMORY): (ENOMEM, EMFILE),
    ("memfd_create", ""): (ENOMEM, EMFILE, ENFILE),
    ("ftruncate", MEMORY): (EINTR, ENOMEM, EPERM),
    ("fchmod", MEMORY): (EIO, EROFS),
    ("fcntl", MEMORY): (ENOMEM, EPERM, EAGAIN, EINVAL),
}
_UNANSWERED = ("accept", "send", "recv")


def matrix() -> Iterator[Cell]:
    for call, errors in _DISK.items():
        for error in errors:
            yield from (Cell(call, error, occurrence, SPILL, disk=True) for occurrence in OCCURRENCES)
    for (call, target), errors in _OTHERS.items():
        for error in errors:
            yield from (Cell(call, error, occurrence, target) for occurrence in OCCURRENCES)
    for (call, target), errors in _SEGMENTS.items():
        for error in errors:
            yield from (
                Cell(call, error, occurrence, target, fresh=True) for occurrence in ("first", "second", "every")
            )


def sample(seed: int) -> Iterator[Cell]:
    """One cell of each call and errno that is not slow: another of its occurrences with another seed. Of a hang, which
    takes longest, always that of every call."""
    draw = random.Random(seed)
    pairs: dict[tuple[str, int, str], list[Cell]] = {}
    for cell in matrix():
        if not cell.slow and (cell.error != HANG or cell.occurrence == "every"):
            pairs.setdefault((cell.call, cell.error, cell.target), []).append(cell)
    yield from (draw.choice(cells) for cells in pairs.values())


STARTING = [
    ("mkdir", EACCES, "dataplane-"), ("mkdir", ENOSPC, "dataplane-"), ("mkdir", EROFS, "dataplane-"),
    ("open", EMFILE, f"dataplane-{os.getuid()}-"), ("flock", ENOMEM, ""), ("memfd_create", EMFILE, ""),
    ("ftruncate", ENOMEM, MEMORY), ("mmap", ENOMEM, MEMORY), ("pthread_create", EAGAIN, ""),
    ("socket", EMFILE, ""), ("bind", EACCES, ""), ("epoll_ctl", ENOSPC, ""),
]  # fmt: skip
"""What can fail a node's start: the first of each is failed."""
