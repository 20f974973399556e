"""Workers that are processes."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace

import pytest

from dataplane.pipeline import crews
from dataplane.pipeline.functions import Functions


class Clock:
    """A clock that only waits advance."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Busy:
    """A process that ends only when it is killed."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.killed = clock, False

    def join(self, timeout: float | None = None) -> None:
        if not self.killed:
            assert timeout is not None, "it would wait for ever"
            self.clock.now += timeout

    def is_alive(self) -> bool:
        return not self.killed

    def kill(self) -> None:
        self.killed = True

    def close(self) -> None:
        assert self.killed


def test_all_workers_that_do_not_end_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(crews, "time", SimpleNamespace(monotonic=clock.monotonic), raising=False)
    crew = crews.Processes(Functions())
    busy = [Busy(clock) for _ in range(3)]
    for w, each in enumerate(busy):
        ours, theirs = multiprocessing.Pipe()
        theirs.close()
        crew._processes[w] = (each, ours)
        crew._selector.register(ours, crews.selectors.EVENT_READ, w)
    crew.close()
    assert all(each.killed for each in busy)
    assert clock.now == crews.STOP_S
