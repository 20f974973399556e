"""Waiting for one descriptor alone: it is ready, something else is, or nothing."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator

import pytest

from dataplane.wire.polling import PollingSelector

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pairs() -> Iterator[tuple[Pair, Pair]]:
    first, second = socket.socketpair(), socket.socketpair()
    yield first, second
    for each in (*first, *second):
        each.close()


@pytest.mark.parametrize("looks_s", [0.0, 10.0])
def test_only_what_is_asked_for_counts(pairs: tuple[Pair, Pair], looks_s: float) -> None:
    (ours, theirs), (other, others) = pairs
    with PollingSelector() as selector:
        for each in (ours, other):
            selector.register(each, selectors.EVENT_READ)
        selector._look_s = looks_s if looks_s else 0.0
        theirs.send(b"x")
        assert selector.only(ours.fileno(), 10.0)
        others.send(b"x")
        assert not selector.only(ours.fileno(), 10.0)  # both
        ours.recv(1)
        assert not selector.only(ours.fileno(), 10.0)  # the other
        other.recv(1)
        theirs.close()
        assert not selector.only(ours.fileno(), 10.0)  # its end, which is the loop's to deal with


class _Epoll:
    """Has nothing to tell. Between its second look and the next the processor is somebody else's for a millisecond."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waited: list[float] = []

    def poll(self, timeout: float | None = None, most: int = -1) -> list[tuple[int, int]]:
        self.waited.append(timeout or 0.0)
        self.now += 1e-3 if len(self.waited) == 2 else 2e-6
        return []

    def perf_counter(self) -> float:
        return self.now


def test_who_loses_the_processor_while_it_looks_does_not_look_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    epoll = _Epoll()
    monkeypatch.setattr("dataplane.wire.polling.time", epoll)
    with PollingSelector() as selector:
        own, selector._selector = selector._selector, epoll  # type: ignore[attr-defined]
        try:
            selector._look_s = 400e-6
            assert not selector.only(3, 0.02)
            assert epoll.waited == [0, 0, 0.02]
            selector._look_s = 400e-6
            assert not selector.only(3, 0.02)
            assert epoll.waited[3:] == [0.02], "it looked again at once"
            epoll.now, selector._look_s = epoll.now + 1.0, 400e-6
            assert not selector.only(3, 0.02)
            assert len(epoll.waited) > 100, "it never looked again"
        finally:
            selector._selector = own  # type: ignore[attr-defined]
