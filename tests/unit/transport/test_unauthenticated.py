"""Connections that have not named a ticket: how many may wait, for how long, and who is let in."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator

import pytest

from dataplane.transport import unauthenticated
from dataplane.transport.unauthenticated import EACH, MOST, TICKET, UnauthenticatedConnections

TICKET_OF_OURS = b"a ticket of ours"
assert len(TICKET_OF_OURS) == TICKET


class Port:
    """Strangers over socket pairs, whose addresses a test makes up."""

    def __init__(self) -> None:
        self.entered: list[socket.socket] = []
        self.strangers = UnauthenticatedConnections(lambda ticket: ticket == TICKET_OF_OURS, self.entered.append)
        self._theirs: list[socket.socket] = []

    def come(self, address: str, said: bytes = b"") -> socket.socket:
        """Somebody comes; the other end."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            theirs = socket.create_connection(listener.getsockname())
            ours, _ = listener.accept()
        theirs.setblocking(False)
        self._theirs.append(theirs)
        theirs.sendall(said)
        self.strangers.come(ours, address)
        return theirs


@pytest.fixture
def port() -> Iterator[Port]:
    port = Port()
    yield port
    for each in (*port.entered, *port._theirs):
        each.close()
    assert len(port.strangers) == 0


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def gone(theirs: socket.socket) -> bool:
    """Whether the other end has closed it."""
    try:
        return not theirs.recv(1)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


async def test_connections_with_a_ticket_are_accepted_and_their_bytes_are_preserved(port: Port) -> None:
    at_once = port.come("a", TICKET_OF_OURS + b"\1\0\0\0more")
    later = port.come("a")
    await until(lambda: len(port.entered) == 1)
    later.sendall(TICKET_OF_OURS)
    await asyncio.sleep(0)
    later.sendall(b"\1\0\0\0")
    await until(lambda: len(port.entered) == 2)
    for connected, said in zip(port.entered, (b"more", b""), strict=True):
        assert connected.recv(100) == TICKET_OF_OURS + b"\1\0\0\0" + said
    later.sendall(b"x")
    assert port.entered[1].recv(1) == b"x", "a byte wakes who reads"
    assert not gone(at_once)
    assert len(port.strangers) == 0


async def test_the_oldest_connection_of_an_address_is_closed_for_its_next_one(port: Port) -> None:
    other = port.come("other")
    first = port.come("one")
    rest = [port.come("one") for _ in range(EACH)]
    assert gone(first)
    assert not any(map(gone, (other, *rest)))
    assert len(port.strangers) == 1 + EACH
    port.strangers.close()


async def test_the_oldest_connection_of_the_address_with_the_most_is_closed(port: Port) -> None:
    oldest = port.come("alone")
    many = [port.come("many") for _ in range(EACH)]
    some = [port.come(f"some {number % 10}") for number in range(MOST - EACH)]
    assert len(port.strangers) == MOST
    assert gone(many[0])
    assert not any(map(gone, (oldest, *many[1:], *some)))
    port.strangers.close()


async def test_a_silent_connection_is_closed_after_a_timeout(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unauthenticated, "PATIENCE_S", 0.02)
    theirs = port.come("a", b"half of it")
    await until(lambda: gone(theirs))
    assert len(port.strangers) == 0
