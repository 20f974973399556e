"""The link of a rank: no wait is longer than the call's deadline, also where nothing answers."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from dataplane.clock import Deadline
from dataplane.collective.link import RankLink
from dataplane.errors import PeerUnavailable


class Work:
    """Torch's work, which notes how long it is waited for."""

    limits: list[timedelta]

    def __init__(self) -> None:
        self.limits = []

    def wait(self, limit: timedelta) -> None:
        self.limits.append(limit)


@pytest.mark.parametrize("seconds", [0.0, 0.0009, 0.0019])
def test_a_wait_at_the_deadline_has_a_limit_of_whole_milliseconds(seconds: float) -> None:
    """Torch drops parts of a millisecond, and takes 0 as no limit."""
    link, work = RankLink(None, 0, 1), Work()
    link.begin(Deadline.after(seconds, lambda: 0.0))
    link.wait(work, 0)
    link.end(None)
    assert work.limits
    assert all(limit >= timedelta(milliseconds=1) for limit in work.limits)
    assert all(limit % timedelta(milliseconds=1) == timedelta() for limit in work.limits)


class SilentStore:
    """A store whose process is stopped, until `over` is set."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.over.wait()
        raise RuntimeError("the store has gone")


def test_a_silent_rendezvous_store_is_reported_as_an_incomplete_group() -> None:
    pytest.importorskip("torch")
    store = SilentStore()
    link = RankLink(store, 0, 2)
    link.begin(Deadline.after(0))
    with pytest.raises(PeerUnavailable, match="not all 2 ranks") as caught:
        link.connect()
    store.over.set()
    assert caught.value.address == "the group"
    link.end(None)
