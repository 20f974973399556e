from __future__ import annotations

import asyncio

import pytest

from dataplane.closing import close_each


class Parts:
    """Things to close, which note that they were."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    def at_once(self) -> None:
        self.closed.append("at once")

    async def later(self) -> None:
        await asyncio.sleep(0)
        self.closed.append("later")

    async def failing(self) -> None:
        self.closed.append("failing")
        raise OSError("the first")

    def failing_too(self) -> None:
        raise ValueError("the last")

    async def hanging(self) -> None:
        self.closed.append("hanging")
        await asyncio.Event().wait()


async def test_a_failing_close_skips_no_other_and_all_errors_are_reported() -> None:
    parts = Parts()
    with pytest.raises(OSError, match="the first") as raised:
        await close_each(parts.at_once, parts.failing, parts.later, parts.failing_too, parts.at_once)
    assert parts.closed == ["at once", "failing", "later", "at once"]
    assert raised.value.__notes__ == ["closing failed too: ValueError('the last')"]


async def test_a_hanging_close_is_cancelled_and_the_other_closes_are_called() -> None:
    parts = Parts()
    with pytest.raises(TimeoutError):
        await close_each(parts.hanging, parts.at_once, within_s=0.01)
    assert parts.closed == ["hanging", "at once"]


async def test_a_cancelled_close_still_calls_the_other_closes() -> None:
    parts = Parts()
    closing = asyncio.create_task(close_each(parts.hanging, parts.later))
    while not parts.closed:
        await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert parts.closed == ["hanging", "later"]
