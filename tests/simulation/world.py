"""Time and the network of a run. Everything that is drawn while it runs is drawn here, in the order of events."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from typing import Any

#: Ends of links besides nodes, which are 0 and up.
COORDINATOR = -1
CLIENTS = -2


MAX_EVENTS = 100_000
"""Of a run, which has some thousands."""


class World:
    """A heap of events by true time, and links that lose, delay, repeat and reorder what is sent over them."""

    __slots__ = ("_events", "_number", "cuts", "duplicating", "events", "lossy", "now", "reordering", "rng", "stopped")

    def __init__(self, seed: int) -> None:
        self.rng = Random(f"world {seed}")
        self.now = 0.0
        self.events = 0
        self.stopped = False
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self.cuts: dict[tuple[int, int], int] = {}  # (from, to) -> how many faults cut it
        self.lossy = 0.0
        self.duplicating = 0.0
        self.reordering = 0.0

    def at(self, time_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(self._events, (time_s, self._number, call, arguments))

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now + delay_s, self._number, call, arguments))

    def run(self, until_s: float) -> None:
        events, pop = self._events, heapq.heappop
        while events and not self.stopped:
            time_s, _, call, arguments = events[0]
            if time_s > until_s:
                break
            pop(events)
            self.now = time_s
            self.events += 1
            if self.events > MAX_EVENTS:
                raise RuntimeError(f"a run of more than {MAX_EVENTS} events: messages beget messages without end")
            call(*arguments)
        self.now = max(self.now, until_s) if not self.stopped else self.now

    def send(self, sender: int, to: int, call: Callable[..., None], *arguments: Any) -> None:
        """Deliver something over a link, unless it is cut now."""
        if self.cuts and self.cuts.get((sender, to)):
            return
        random = self.rng.random
        if self.lossy and random() < self.lossy:
            return
        self.after(self._delay(), call, *arguments)
        if self.duplicating and random() < self.duplicating:
            self.after(self._delay(), call, *arguments)

    def _delay(self) -> float:
        random = self.rng.random
        delay = 0.0005 + 0.004 * random() * random()
        if self.reordering and random() < self.reordering:
            delay += 0.4 * random() ** 2
        return delay
