"""What many small streams cost a node, and that it has the memory back when they are gone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import dataplane as dp
from dataplane.aio import AsyncPlane, AsyncStream
from tests.processes import StandingNode, eventually

NODE = {"spill": 0}
KIB = 1024
STREAMS = 2048


def anonymous(pid: int) -> int:
    """Bytes of a process that are no file's and not shared."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


async def made(plane: AsyncPlane) -> list[AsyncStream]:
    """Streams of one row each."""
    streams = [await plane.stream(f"s{i}", tasks=["reward", "actor"]) for i in range(STREAMS)]
    for stream in streams:
        await stream.append({"x": np.zeros(1)})
    return streams


@pytest.mark.long
async def test_many_small_streams_use_little_memory_and_return_it_when_dropped(node: StandingNode) -> None:
    async with dp.aio.connect(node.address) as plane:
        warm = await plane.stream("warm", tasks=["reward", "actor"])
        await warm.append({"x": np.zeros(1)})
        before = anonymous(node.pid)
        streams = await made(plane)
        taken = anonymous(node.pid) - before
        assert taken < STREAMS * 20 * KIB  # they were 213 KiB each
        for stream in streams:
            await stream.drop()
        # What stays is free, in arenas that something else is in: between a third and a half, as objects fall.
        eventually(lambda: anonymous(node.pid) - before < taken * 2 / 3, "their memory is given back")
        await made(plane)
        assert anonymous(node.pid) - before < taken * 5 / 4, "as many again take the memory of those that went"
