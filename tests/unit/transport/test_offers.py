"""One offer: each byte once, and an end that is one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from dataplane.transport.base import Memory
from dataplane.transport.offers import DONE, OfferedMemory


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.fixture
def offered() -> OfferedMemory:
    return OfferedMemory(Memory(0, 0, 100))


def test_each_byte_is_granted_once(offered: OfferedMemory, pair: tuple[socket.socket, socket.socket]) -> None:
    stream, _ = pair
    wanted = [[(10, 20), (30, 40)], [(15, 16)], [(0, 11)], [(20, 30)], [(39, 41)], [(0, 10), (40, 100)]]
    assert [offered.take(stream, each) for each in wanted] == [True, False, False, True, False, True]


def test_an_offer_ended_before_its_confirmation_closes_the_connection(
    offered: OfferedMemory, pair: tuple[socket.socket, socket.socket]
) -> None:
    stream, reader = pair
    assert offered.take(stream, [(0, 100)])
    ending = threading.Thread(target=offered.end, args=(10.0,))
    ending.start()
    assert reader.recv(1) == b""
    with pytest.raises(EOFError):
        offered.confirm(stream)
    offered.leave(stream)
    ending.join(60)
    assert not ending.is_alive()


def test_an_offer_ended_after_its_confirmation_leaves_the_connection_usable(
    offered: OfferedMemory, pair: tuple[socket.socket, socket.socket]
) -> None:
    """The reader withdraws as soon as it has the last word, maybe before the thread that said it has gone on."""
    stream, reader = pair
    assert offered.take(stream, [(0, 100)])
    offered.confirm(stream)
    offered.end(0.0)
    stream.sendall(b"next")
    assert reader.recv(10) == DONE + b"next"


def test_a_reader_that_does_not_leave_an_ended_offer_is_disconnected(
    offered: OfferedMemory, pair: tuple[socket.socket, socket.socket]
) -> None:
    stream, reader = pair
    assert offered.take(stream, [(0, 100)])

    def serve() -> None:
        stream.recv(1)  # until it is shut down on this side, too
        offered.leave(stream)

    serving = threading.Thread(target=serve)
    serving.start()
    offered.end(0.01)
    serving.join(60)
    assert reader.recv(1) == b""
    assert not offered.take(stream, [(0, 100)])
