"""A put or get that is cancelled, at any moment, leaves nothing behind and disturbs nobody."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane.aio import AsyncPlane
from dataplane.batch import values
from dataplane.client import background
from tests.processes import MIB, StandingNode, pattern, until

NODE = {"memory": "64MiB", "spill": 0}
pytestmark = pytest.mark.usefixtures("node")


@pytest.fixture
async def plane(node: StandingNode) -> AsyncIterator[AsyncPlane]:
    async with dp.aio.connect(node.address) as plane:
        yield plane


async def nothing_is_left(plane: AsyncPlane) -> None:
    async def empty() -> bool:
        stats = await plane.stats()
        return (stats.memory_used, stats.shards, stats.waiting, stats.pinned_bytes) == (0, 0, 0, 0)

    await until(empty)


@pytest.mark.parametrize("size", [4096, 512 << 10, 8 * MIB], ids=["inline", "in the loop", "in threads"])
async def test_a_put_cancelled_at_any_step_leaves_nothing(plane: AsyncPlane, size: int) -> None:
    columns = {"x": pattern(1, size)}
    for delay in [*range(30), *(random.Random(1).randrange(3000) for _ in range(40))]:
        task = asyncio.create_task(plane.put(columns, timeout=60))
        for _ in range(delay):
            await asyncio.sleep(0)
        task.cancel()
        try:
            await plane.free(await task)
        except asyncio.CancelledError:
            pass
    await nothing_is_left(plane)
    assert (await plane.stats()).reserved_bytes == 0


async def test_a_get_cancelled_at_any_step_leaves_no_pin(plane: AsyncPlane) -> None:
    ref = await plane.put({"x": pattern(1, MIB)})
    for delay in range(60):
        task = asyncio.create_task(plane.get(ref))
        for _ in range(delay):
            await asyncio.sleep(0)
        task.cancel()
        try:
            assert np.array_equal((await task)["x"].numpy(), pattern(1, MIB))
        except asyncio.CancelledError:
            pass
        del task

    async def unpinned() -> bool:
        return (await plane.stats()).pinned_bytes == 0

    await until(unpinned)


class Copying:
    """Threads that copy a put wait, as they begin, until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self._go, self._copy = threading.Event(), threading.Event(), values.copy
        monkeypatch.setattr(values, "copy", self._wait)

    def _wait(self, target: Any, source: Any) -> None:
        self.begun.set()
        assert self._go.wait(60)
        self._copy(target, source)

    def hold(self) -> None:
        """The next that copies waits."""
        self.begun.clear()
        self._go.clear()

    def let_go(self) -> None:
        self._go.set()


@pytest.mark.parametrize("times", [1, 3])
async def test_a_cancelled_put_does_not_write_into_memory_of_the_next_put(
    plane: AsyncPlane, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """Its threads are copying when it is cancelled; the memory must not go to others before they have stopped."""
    old, new = pattern(1, 48 * MIB, 8), pattern(2, 48 * MIB, 8)
    copying = Copying(monkeypatch)
    for _ in range(3):
        copying.hold()
        task = asyncio.create_task(plane.put({"x": old}, timeout=60))
        assert await asyncio.to_thread(copying.begun.wait, 60)
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        following = asyncio.create_task(plane.put({"x": new}, timeout=60))
        copying.let_go()
        with pytest.raises(asyncio.CancelledError):
            await task
        ref = await following
        assert np.array_equal((await plane.get(ref))["x"].numpy(), new)
        await plane.free(ref)


async def getting(plane: AsyncPlane, monkeypatch: pytest.MonkeyPatch) -> tuple[Copying, asyncio.Task[Any], Any]:
    """A get of `pattern(1, 8 * MIB)` into `out` whose thread waits to copy."""
    ref = await plane.put({"x": pattern(1, 8 * MIB)})
    out = np.zeros_like(pattern(1, 8 * MIB))
    copying = Copying(monkeypatch)
    task = asyncio.create_task(plane.get(ref, out={"x": out}))
    assert await asyncio.to_thread(copying.begun.wait, 60)
    return copying, task, out


async def test_a_cancelled_get_ends_only_after_its_copies_have_stopped(
    plane: AsyncPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    copying, task, _ = await getting(plane, monkeypatch)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    copying.let_go()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_close_that_waits_for_threads_does_not_block_the_event_loop(
    node: StandingNode, plane: AsyncPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = await dp.aio.connect(node.address)
    copying = Copying(monkeypatch)
    putting = asyncio.create_task(closed.put({"x": pattern(1, 32 * MIB)}))
    assert await asyncio.to_thread(copying.begun.wait, 60)
    closing = asyncio.create_task(closed.aclose())
    assert (await plane.stats()).reserved_bytes >= 32 * MIB, "the loop goes on"
    assert not closing.done()
    copying.let_go()
    await closing
    with pytest.raises(dp.Closed):
        await putting
    await nothing_is_left(plane)


async def test_a_plane_whose_close_is_cancelled_is_closed(
    node: StandingNode, plane: AsyncPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(connection: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(background, "end_all", hangs)
    closed = await dp.aio.connect(node.address)
    await closed.put({"x": pattern(1, 8 * MIB)}, scope="s")
    closing = asyncio.create_task(closed.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    with pytest.raises(dp.Closed):
        await closed.put({"x": [1]})
    await plane.free(scope="s")
    await nothing_is_left(plane)
