"""A slowed `dataplane node`: each read and write of spilled bytes takes $SLOWED_DISK_S additional seconds a MiB."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from dataplane import cli
from dataplane.store import spill_file


def slow(seconds_a_mib: float) -> None:
    """Slow this process's spill files by these seconds a MiB."""
    pwrite, preadv = os.pwrite, os.preadv

    class Slowed:
        """The module `os` with two slower calls."""

        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        @staticmethod
        def pwrite(fd: int, data: Any, offset: int) -> int:
            """Wait, then call `os.pwrite`."""
            time.sleep(seconds_a_mib * memoryview(data).nbytes / (1 << 20))
            return pwrite(fd, data, offset)

        @staticmethod
        def preadv(fd: int, buffers: Any, offset: int) -> int:
            """Wait, then call `os.preadv`."""
            time.sleep(seconds_a_mib * sum(memoryview(each).nbytes for each in buffers) / (1 << 20))
            return preadv(fd, buffers, offset)

    spill_file.os = Slowed()  # type: ignore[attr-defined]


if __name__ == "__main__":
    slow(float(os.environ.get("SLOWED_DISK_S", "0")))
    sys.exit(cli.main())
