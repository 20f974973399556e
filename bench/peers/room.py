"""Whether there is memory and disk for a measurement, before it begins; and the scale that would fit."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from bench.peers.workloads import Workload, largest_scale

GIB = 1 << 30
#: The largest part of the video task's prompts that is taken where none is said.
MOST = 1 / 16
#: Bytes of the largest environment, which has torch and Ray.
ENVIRONMENT_BYTES = 3 * GIB


class TooLittle(Exception):
    """There is not room; the text says of what, and what would fit."""


@dataclass(frozen=True)
class Room:
    """Free bytes: of memory, of the shared memory's file system, of the disks for scratch and for environments."""

    memory: int
    shared: int
    scratch: int
    cache: int


def room(scratch: Path, cache: Path) -> Room:
    """What there is now."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    memory = int(meminfo["MemAvailable"].split()[0]) * 1024
    while not cache.exists():
        cache = cache.parent
    shared = Path("/dev/shm")
    free = shutil.disk_usage(shared).free if shared.exists() else memory
    return Room(memory, free, shutil.disk_usage(scratch).free, shutil.disk_usage(cache).free)


def scale_that_fits(there: Room, names: Collection[str]) -> float | None:
    """The scale that is taken for these workloads where none is said: half of the memory is left to others."""
    fits = largest_scale(min(there.memory // 2, there.shared), names)
    return None if fits is None else min(fits, MOST)


def check(workloads: Sequence[Workload], there: Room, environments: int) -> None:
    """Raises `TooLittle`. `environments` is how many have to be made first."""
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
