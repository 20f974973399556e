"""What is asked of a node that does not answer, by real sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from dataplane.errors import OutcomeUnknown, PeerUnavailable
from dataplane.node.shards import fetch
from dataplane.node.shards.fetch import Fetcher
from dataplane.transport.choice import TransportChoice
from dataplane.wire import peer_messages as pm
from dataplane.wire.messages import Done, Message
from tests.cases import each_case
from tests.processes import until
from tests.unit.node.shards.members import ME
from tests.unit.node.shards.owners import OWNER, owning
from tests.unit.store.stores import moving


async def test_an_unanswered_free_has_an_unknown_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the owner is a member; what one that has ended had is gone anyhow."""
    monkeypatch.setattr(fetch, "_CONTROL_S", 0.1)
    heard = asyncio.Event()

    async def answer(request: Any) -> Message:
        heard.set()
        await asyncio.Event().wait()
        return Done(request.id)

    async with (
        owning(answer) as (_, mine, members),
        moving({"memory": 1 << 20, "spill": 0, "spill_dir": tmp_path}) as stored,
    ):
        fetcher = Fetcher(ME, stored, mine, members, TransportChoice(()))
        with pytest.raises(OutcomeUnknown, match="free it again"):
            await fetcher.free(OWNER, [(1, [0], (0, 1, b""))])
        await heard.wait()
        members.lose(OWNER)
        await fetcher.free(OWNER, [(1, [0], (0, 1, b""))])
        await fetcher.aclose()


@each_case("how", ["cancelled", "not answered in time"])
async def test_a_retain_that_fails_has_retained_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The owner has made the links, and answers once the caller has gone."""
    if how != "cancelled":
        monkeypatch.setattr(fetch, "_CONTROL_S", 0.1)
    heard, go = asyncio.Event(), asyncio.Event()
    freed: list[int] = []

    async def answer(request: Any) -> Message:
        if isinstance(request, pm.FreeParts):
            freed.extend(number for number, *_ in request.parts)
            return pm.PartsFreed(request.id, [])
        heard.set()
        await go.wait()
        return pm.Linked(request.id, [7])

    async with (
        owning(answer) as (_, mine, members),
        moving({"memory": 1 << 20, "spill": 0, "spill_dir": tmp_path}) as stored,
    ):
        fetcher = Fetcher(ME, stored, mine, members, TransportChoice(()))
        retaining = asyncio.create_task(fetcher.retain(OWNER, [(1, [([0], (0, 1, b""))])]))
        await heard.wait()
        if how == "cancelled":
            retaining.cancel()
        with pytest.raises((PeerUnavailable, asyncio.CancelledError)):
            await retaining
        go.set()
        await until(lambda: freed == [7])
        await fetcher.aclose()
