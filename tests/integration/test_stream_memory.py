"""What many small streams cost a node, and that it has the memory back when they are gone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import dataplane as dp
from dataplane.aio import AsyncPlane, AsyncStream
from tests.processes import MIB, StandingNode, eventually, own_memory

NODE = {"spill": 0}
KIB = 1024
STREAMS = 2048


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
        before = own_memory(node.pid)
        streams = await made(plane)
        taken = own_memory(node.pid) - before
        assert taken < STREAMS * 20 * KIB  # they were 213 KiB each
        for stream in streams:
            await stream.drop()
        # What stays is free, in arenas that something else is in: between a third and a half, as objects fall.
        eventually(lambda: own_memory(node.pid) - before < taken * 2 / 3, "their memory is given back")
        await made(plane)
        assert own_memory(node.pid) - before < taken * 5 / 4, "as many again take the memory of those that went"


def test_a_node_that_appends_have_filled_has_room_for_the_columns_of_later_tasks(tmp_path: Path) -> None:
    config = dp.NodeConfig(memory="8MiB", spill="8MiB", spill_dir=tmp_path, prewarm=0, compression="never")
    with dp.connect(config=config) as plane:
        stream, appended = plane.stream("rollouts", tasks=["reward", "actor"]), 0
        with pytest.raises(dp.Backpressure):
            while True:
                stream.append({"x": np.full((1, MIB), appended, np.uint8)}, timeout=0.5)
                appended += 1
        assert appended > 12
        for _ in range(appended):
            with stream.consume("reward", rows=1, columns=["x"]) as delivery:
                delivery.get()
                stream.extend(delivery.ref, {"reward": [1.0]})
        found = []
        for _ in range(appended):
            with stream.consume("actor", rows=1, columns=["x", "reward"]) as delivery:
                found.append(int(delivery.get()["x"].numpy()[0, 0]))
        assert found == list(range(appended))
