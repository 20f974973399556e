"""Background work: what a plane that is being closed waits for."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from dataplane.client import background
from dataplane.client.background import Background, end_all


class Place:
    """The part of a connection that background work reads."""

    address = "unix:/nowhere"


class Work(Background):
    async def _run(self, plane: Any, stop: asyncio.Event) -> None:
        await stop.wait()


class Failing(Work):
    async def _connected(self) -> None:
        raise OSError("no node")


def test_finished_background_work_is_forgotten() -> None:
    place: Any = Place()
    work = Failing(place, "first").start()
    with pytest.raises(OSError, match="no node"):
        work.wait()
    waiting = Work(place, "second")
    assert background._begun[place] == [waiting]
    third = Work(place, "third")
    assert background._begun[place] == [waiting, third]


async def test_a_plane_does_not_wait_for_work_that_got_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    place: Any = Place()
    work = Work(place, "work")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            work.start()
    try:
        async with asyncio.timeout(30):
            await end_all(place)
    finally:
        work._begun.set()
