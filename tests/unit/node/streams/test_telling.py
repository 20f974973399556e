"""What homes tell other nodes, where this node begins anew in between."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from dataplane.batch.field import Field
from dataplane.batch.ref import BatchRef
from dataplane.errors import PeerUnavailable
from dataplane.node.streams.telling import Telling
from dataplane.stream.progress import ACKED
from dataplane.stream.rows import Rows
from dataplane.wire import messages as m

ME, THEM = b"me......", b"them...."


@pytest.mark.parametrize("begun", [False, True])
async def test_what_comes_after_it_began_anew_is_told_and_of_what_was_before_nobody_knows(begun: bool) -> None:
    """Also where the task that told of what was before had not run yet."""
    heard: list[list[int]] = []
    hears = asyncio.Event()

    async def tell(node: bytes, message: Any, kind: type, timeout_s: float) -> m.Done:
        await hears.wait()
        heard.extend(np.frombuffer(rows, np.int64).tolist() for _, _, rows, _, _ in message.settled)
        return m.Done(message.id)

    asking = SimpleNamespace(knows=lambda node: True, next_id=lambda: 1, tell=tell)
    telling, stored = Telling(ME, cast(Any, asking)), Rows()
    stored.append(BatchRef.of(THEM, 2, [("x", Field("dense", "int64", ()), 16, 1, 0)]))
    telling.note(b"token", stored, 0, np.array([0]), ACKED)
    before = asyncio.ensure_future(telling.told())
    await asyncio.sleep(0) if begun else None
    telling.begin_anew()
    telling.note(b"token", stored, 0, np.array([1]), ACKED)
    after = asyncio.ensure_future(telling.told())
    hears.set()
    async with asyncio.timeout(5):
        await after
        if begun:
            with pytest.raises(PeerUnavailable):
                await before
        else:  # it began to wait only then
            await before
    assert heard == [[1]]
    await telling.aclose()
