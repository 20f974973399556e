"""The causes that the page shows: those of the time that has viewers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from dataplane.web import causes
from dataplane.web.causes import Causes, CauseText
from tests.processes import until

OLD = CauseText(what="reward: code in score", cost="0.15 s of a step, 90 %", where="job.py:19", chain="", change="")


@asynccontextmanager
async def watching(found: Causes, plane: Any, seen: asyncio.Event) -> AsyncIterator[None]:
    task = asyncio.create_task(found.watch(plane, seen))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_causes_are_forgotten_while_nobody_views_them() -> None:
    found = Causes()
    found.found = (OLD,)
    async with watching(found, SimpleNamespace(graphs=object()), asyncio.Event()):
        await until(lambda: found.found == ())


async def test_a_diagnosis_that_fails_is_logged_and_followed_by_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(causes, "WATCH_S", 0.0)
    asked = 0

    async def graphs() -> None:
        nonlocal asked
        asked += 1
        raise ValueError("an odd graph")

    seen = asyncio.Event()
    seen.set()
    async with watching(Causes(), SimpleNamespace(graphs=graphs), seen):
        await until(lambda: asked > 2)
    assert "an odd graph" in caplog.text
