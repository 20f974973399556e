"""Checks that there is memory and disk for a measurement before it begins, and finds the scale that would fit."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from bench.peers.workloads import Workload, largest_scale

GIB = 1 << 30
#: The largest scale that is chosen if no scale is given.
MOST = 1 / 16
#: Bytes of the largest environment, which has torch and Ray.
ENVIRONMENT_BYTES = 3 * GIB


class TooLittle(Exception):
    """There is too little memory or disk; the text says which, and what would fit."""


@dataclass(frozen=True)
class Room:
    """Free bytes: of memory, of the file system of shared memory, and of the disks for scratch files and for
    environments."""

    memory: int
    shared: int
    scratch: int
    cache: int


def room(scratch: Path, cache: Path) -> Room:
    """The free bytes now."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    memory = int(meminfo["MemAvailable"].split()[0]) * 1024
    while not cache.exists():
        cache = cache.parent
    shared = Path("/dev/shm")
    free = shutil.disk_usage(shared).free if shared.exists() else memory
    return Room(memory, free, shutil.disk_usage(scratch).free, shutil.disk_usage(cache).free)


def scale_that_fits(there: Room, names: Collection[str]) -> float | None:
    """The default scale for these workloads, which leaves half of the memory free. None if no scale fits."""
    fits = largest_scale(min(there.memory // 2, there.shared), names)
    return None if fits is None else min(fits, MOST)


def check(workloads: Sequence[Workload], there: Room, environments: int) -> None:
    """Raise `TooLittle` without enough memory and disk. `environments`: how many have to be created first."""
    needed = max(w.memory_needed for w in workloads)
    memory = min(there.memory, there.shared)
    if needed > memory:
        fits = largest_scale(memory, [each.name for each in workloads])
        hint = f"--scale {Fraction(fits)} would fit" if fits else "no scale would fit"
        raise TooLittle(f"this needs {needed / GIB:.1f} GiB of memory, and {memory / GIB:.1f} are free; {hint}")
    spilled = max(w.nbytes for w in workloads) + GIB
    if spilled > there.scratch:
        raise TooLittle(
            f"this needs {spilled / GIB:.1f} GiB of disk for scratch, and {there.scratch / GIB:.1f} are free"
        )
    if environments * ENVIRONMENT_BYTES > there.cache:
        raise TooLittle(
            f"{environments} environments have to be made, of up to {environments * ENVIRONMENT_BYTES / GIB:.0f} GiB,"
            f" and {there.cache / GIB:.1f} are free; --only NAME makes one"
        )
