"""What the log says of strangers' nonsense is bounded, and says how much more there was."""

from __future__ import annotations

import logging

import pytest

from dataplane.wire.boundary import EACH_S, MOST, InvalidMessageLog

LOG = logging.getLogger("dataplane.test")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_invalid_messages_of_a_sender_are_logged_a_few_times_and_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    complain = InvalidMessageLog(LOG, clock=lambda: now)
    for number in range(1000):
        complain.log(logging.WARNING, "a", "%s sent %d", "a", number)
    complain.log(logging.WARNING, "b", "%s is another", "b")
    assert said(caplog) == [*(f"a sent {number}" for number in range(MOST)), "b is another"]
    now += EACH_S
    complain.log(logging.WARNING, "a", "%s sent %d", "a", 1000)
    assert said(caplog) == [f"a: {1000 - MOST} more of this kind in 60 s", "a sent 1000"]
