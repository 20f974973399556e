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
