"""`dataplane node` that is slowed: each read and write of spilled bytes takes $SLOWED_DISK_S seconds a MiB
longer."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from dataplane import cli
from dataplane.store import spill_file


def slow(seconds_a_mib: float) -> None:
    """Make this process's spilling slow."""
    pwrite, preadv = os.pwrite, os.preadv

    class Slowed:
        """`os`, but for two calls."""

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        @staticmethod
        def pwrite(fd: int, data: Any, offset: int) -> int:
            """As that of `os`."""
            time.sleep(seconds_a_mib * memoryview(data).nbytes / (1 << 20))
            return pwrite(fd, data, offset)

        @staticmethod
        def preadv(fd: int, buffers: Any, offset: int) -> int:
            """As that of `os`."""
            time.sleep(seconds_a_mib * sum(memoryview(each).nbytes for each in buffers) / (1 << 20))
            return preadv(fd, buffers, offset)

    spill_file.os = Slowed()  # type: ignore[attr-defined]


if __name__ == "__main__":
    slow(float(os.environ.get("SLOWED_DISK_S", "0")))
    sys.exit(cli.main())
