"""Memory is given back to the host together, and seldom."""

from __future__ import annotations

import asyncio

import pytest

from dataplane.node import memory_trim
from dataplane.node.memory_trim import MemoryTrim


async def test_memory_freed_together_is_trimmed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_trim, "_SOON_S", 0.01)
    cooled = asyncio.Event()
    trim = MemoryTrim(cooled.set)
    trim.freed((8 << 20) - 1)
    assert trim._timer is None
    for _ in range(100):
        trim.due()
    trim.freed(1)
    async with asyncio.timeout(60):
        await cooled.wait()
    assert trim.count == 1
    trim.freed(8 << 20)
    assert trim._timer is not None
    assert trim._timer.when() >= asyncio.get_running_loop().time() + 5, "trims are ten seconds apart"
    trim.close()
