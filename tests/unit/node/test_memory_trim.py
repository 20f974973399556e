"""Memory is given back to the host when much of it has gone, and seldom."""

from __future__ import annotations

import asyncio
import mmap

import pytest

from dataplane.node import memory_trim
from dataplane.node.memory_trim import MemoryTrim, anonymous


async def looked(trim: MemoryTrim) -> None:
    """Until nothing is due any more."""
    while trim._timer is not None:
        await asyncio.sleep(0.001)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_trim, "_SOON_S", 0.01)
    monkeypatch.setattr(memory_trim, "_BETWEEN_S", 0.0)
    monkeypatch.setattr(memory_trim, "_SHARE", 1.0)


async def test_memory_freed_together_is_trimmed_once() -> None:
    trim = MemoryTrim()
    grown = mmap.mmap(-1, 16 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    grown.write(bytes(len(grown)))
    assert anonymous() >= trim._floor + (15 << 20)
    for _ in range(100):
        trim.due()
    await looked(trim)
    assert trim.count == 1
    grown.close()
