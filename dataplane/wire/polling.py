"""An event loop that polls before it blocks.

A request and its reply between two processes of one host take 90 microseconds here. Of these, 60 are spent on putting a
processor to sleep and waking it; if both processes poll, that is 6. Therefore the event loop polls for a short time
before it blocks, if that has recently succeeded. The time is adapted as in KVM's halt polling (Linux,
virt/kvm/kvm_main.c, `grow_halt_poll_ns`): an event soon after blocking makes the next poll longer, one after a long
time makes it shorter. An idle loop blocks at once, and uses no processor time.

If more processes are runnable than there are processors, polling may keep the process that is to answer from running.
The loop detects that by a long time between two polls, in which another process had the processor. Then it does not
poll for a while.
"""

from __future__ import annotations

import asyncio
import select
import selectors
import time
from typing import Any

_MOST_S = 400e-6  # the longest computation between two messages of a small put or get, on a slow processor too
_FIRST_S = 20e-6
_FRESH_S = 50e-6
_LOST_S = 50e-6  # a longer time between two polls, which take 1 to 2 us, means that another process had the processor
_CROWDED_S = 20e-3  # for which the loop then does not poll
BLOCK_S = 1.0
"""The longest time to block. A signal that comes just before a thread blocks does not wake it, and its handler runs
only afterwards."""


class PollingSelector(selectors.EpollSelector):
    """Epoll that polls for up to 400 microseconds before it blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.polls = True
        """Whether to poll at all. False while other threads of this process have work."""
        self._look_s = 0.0
        self._crowded_until = 0.0
        self._fresh_until = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, Any]]:
        """As `EpollSelector.select`, but may return nothing before the timeout."""
        began = now = time.perf_counter()
        if timeout is not None and timeout <= 0:
            # The loop has work, and only checks for further events. It does so before every step of a task, so a system
            # call each time would take a large part of the time of a short call.
            if now < self._fresh_until:
                return []
            self._fresh_until = now + _FRESH_S
            return super().select(timeout)
        if not self.polls:
            return super().select(timeout)
        until = self._until(began, self._look_s if timeout is None else min(self._look_s, timeout))
        poll = self._selector.poll  # type: ignore[attr-defined]  # select() would cost more than the call
        while now < until:
            if poll(0, 1):
                return super().select(0)
            before, now = now, time.perf_counter()
            if now - before > _LOST_S:
                self._crowded_until = now + _CROWDED_S
                break
        ready = super().select(BLOCK_S if timeout is None else min(timeout, BLOCK_S))
        self._learn(bool(ready), time.perf_counter() - began)
        return ready

    def only(self, descriptor: int, timeout: float) -> bool:
        """Wait as `select` does, but at most this long. Returns whether that descriptor is readable and nothing else
        has happened."""
        began = now = time.perf_counter()
        until, expected = self._until(began, self._look_s), [(descriptor, select.EPOLLIN)]
        poll = self._selector.poll  # type: ignore[attr-defined]  # as above
        while now < until:
            if ready := poll(0, 2):
                return bool(ready == expected)
            before, now = now, time.perf_counter()
            if now - before > _LOST_S:
                self._crowded_until = now + _CROWDED_S
                break
        ready = poll(timeout, 2)
        self._learn(bool(ready), time.perf_counter() - began)
        return bool(ready == expected)

    def _until(self, now: float, look_s: float) -> float:
        return now + look_s if now >= self._crowded_until else now

    def _learn(self, ready: bool, waited: float) -> None:
        if not ready or waited > _MOST_S:
            self._look_s /= 2 if self._look_s > _FIRST_S else 1e9
        else:
            self._look_s = min(_MOST_S, max(_FIRST_S, 2 * self._look_s))


def polling_loop(selector: PollingSelector | None = None) -> asyncio.AbstractEventLoop:
    """A new event loop with this selector, or with a new `PollingSelector`."""
    return asyncio.SelectorEventLoop(selector or PollingSelector())
