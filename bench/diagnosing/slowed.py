"""`dataplane node` that is slowed: each read and write of spilled bytes takes $SLOWED_DISK_S seconds a MiB longer; each
request to a partition of the streams $SLOWED_STREAMS that the node leads takes its loop $SLOWED_PARTITION_S seconds."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Collection
from typing import Any

from dataplane import cli
from dataplane.store import spillfile
from dataplane.stream.machine import StreamMachine


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

    spillfile.os = Slowed()  # type: ignore[attr-defined]


def slow_partitions(seconds: float, streams: Collection[str]) -> None:
    """Make each request to a partition of these streams that this process leads take so long: it can serve no more."""
    decide = StreamMachine.decide_decoded

    def slowed(self: StreamMachine, asked: Any, term: int, now: float) -> Any:
        if self.name in streams:
            time.sleep(seconds)
        return decide(self, asked, term, now)

    StreamMachine.decide_decoded = slowed  # type: ignore[method-assign]


if __name__ == "__main__":
    slow(float(os.environ.get("SLOWED_DISK_S", "0")))
    if float(os.environ.get("SLOWED_PARTITION_S", "0")):
        slow_partitions(float(os.environ["SLOWED_PARTITION_S"]), os.environ["SLOWED_STREAMS"].split(","))
    sys.exit(cli.main())
