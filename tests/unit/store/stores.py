"""Stores whose shards move, and shards of plain bytes for them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from dataplane.batch.field import Field
from dataplane.batch.layout import ColumnLayout, ShardLayout
from dataplane.clock import Deadline
from dataplane.config import NodeConfig
from dataplane.store.store import Store
from tests.processes import WAIT_S


class FakeClock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def soon() -> Deadline:
    return Deadline.after(WAIT_S)


def layout(nbytes: int) -> bytes:
    column = ColumnLayout(Field("dense", "uint8", (nbytes,)), 1, 1, ((0, nbytes),))
    return ShardLayout((("x", column),)).encode()


def content(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


@asynccontextmanager
async def moving(settings: dict[str, Any], **more: Any) -> AsyncIterator[Store]:
    """A store with these settings, until it has ended in good order."""
    store = Store(NodeConfig(**({"prewarm": 0} | settings)), **more)
    mover = asyncio.create_task(store.residency.run())
    try:
        yield store
        assert not mover.done(), mover.exception()
    finally:
        mover.cancel()
        await asyncio.gather(mover, return_exceptions=True)
        await store.aclose()
