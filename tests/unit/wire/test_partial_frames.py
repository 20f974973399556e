"""Messages of which a part has come, over all connections: who waits, who goes on, who is cut off."""

from __future__ import annotations

import asyncio

import pytest

from dataplane.errors import LimitExceeded
from dataplane.wire import partial_frames
from dataplane.wire.partial_frames import SHARE, PartialFrames

BOUND = 10 * SHARE


class One:
    """A connection."""

    def __init__(self, all_: PartialFrames) -> None:
        self._all = all_
        self.reads = True
        self.cut: LimitExceeded | None = None
        self._has = 0

    def comes(self, nbytes: int) -> None:
        """So many bytes of a message come."""
        self._has += nbytes
        self._all.note(self, self._has, anew=False)

    def completes(self) -> None:
        """The rest of it comes."""
        self._has = 0
        self._all.note(self, 0, anew=True)

    def hold_on(self) -> None:
        self.reads = False

    def go_on(self) -> None:
        self.reads = True

    def cut_off(self, error: LimitExceeded) -> None:
        self.cut = error
        self._all.gone(self)


async def test_large_frames_of_many_connections_all_complete_within_the_bound() -> None:
    """However they come by turns, as from an event loop that reads a part of each."""
    all_ = PartialFrames(BOUND)
    left = {One(all_): 20 for _ in range(15)}
    for _ in range(1000):
        for one in [one for one in left if one.reads]:
            if left[one] > 1:
                one.comes(SHARE)
                left[one] -= 1
            else:
                one.completes()
                del left[one]
        assert all_.nbytes <= BOUND + 15 * 2 * SHARE + 20 * SHARE
    assert not left
    assert all_.nbytes == 0


async def test_a_slow_connection_is_closed_only_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_frames, "_LOOK_S", 0.01)
    all_ = PartialFrames(BOUND, patience_s=0.03)
    slow, other = One(all_), One(all_)
    slow.comes(11 * SHARE)
    await asyncio.sleep(0.06)
    assert slow.cut is None, "nobody waits"
    other.comes(2 * SHARE)
    async with asyncio.timeout(60):
        while not other.reads:
            await asyncio.sleep(0.001)
    assert isinstance(slow.cut, LimitExceeded)
    assert other.cut is None, "it could not go on before"
    all_.gone(other)
