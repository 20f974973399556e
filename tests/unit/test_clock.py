from __future__ import annotations

import time

import pytest

from dataplane.clock import Deadline, monotonic


def test_a_jump_of_wall_time_moves_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    deadline = Deadline.after(1000)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    assert monotonic is time.monotonic
    assert 990 < deadline.remaining_s <= 1000
