"""What the log says of strangers' nonsense is bounded, and says how much more there was."""

from __future__ import annotations

import asyncio
import logging

import pytest

from dataplane.wire import complaints
from dataplane.wire.complaints import EACH_S, MOST, Complaints

LOG = logging.getLogger("dataplane.test")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_a_sender_has_a_few_lines_and_then_a_count(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    complain = Complaints(LOG, clock=lambda: now)
    for number in range(1000):
        complain.log(logging.WARNING, "a", "%s sent %d", "a", number)
    complain.log(logging.WARNING, "b", "%s is another", "b")
    assert said(caplog) == [*(f"a sent {number}" for number in range(MOST)), "b is another"]
    now += EACH_S
    complain.log(logging.WARNING, "a", "%s sent %d", "a", 1000)
    assert said(caplog) == [f"a: {1000 - MOST} more of this kind in 60 s", "a sent 1000"]


async def test_the_count_is_told_also_if_nothing_more_comes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(complaints, "EACH_S", 0.01)
    now = 100.0
    complain = Complaints(LOG, clock=lambda: now)
    for _ in range(MOST + 3):
        complain.log(logging.WARNING, "a", "nonsense")
    now += 1.0
    said(caplog)
    async with asyncio.timeout(30):
        while not caplog.records:
            await asyncio.sleep(0.01)
    assert said(caplog) == ["a: 3 more of this kind in 1 s"]
