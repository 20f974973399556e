"""Where a transport listens: who comes while the system refuses to accept, or to watch, comes in later; how many may be
without a ticket, for how long, and who is let in."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from dataplane.transport import listener
from dataplane.transport.listener import EACH, REQUEST, STRANGERS, Listener
from tests.processes import until


class Refuses:
    """A listening socket that can not accept, and a loop that can not watch it, so often each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, accepts: int, watches: int) -> None:
        self.left = {"accept": accepts, "watch": watches}
        loop = asyncio.get_running_loop()
        add_reader, accept = loop.add_reader, socket.socket.accept

        def watch(fd: int, callback: Callable[..., None], *args: Any) -> None:
            if callback.__name__ == "_accept" and self.left["accept"] == 0:
                self._take("watch", errno.ENOSPC)
            add_reader(fd, callback, *args)

        def take(listener: socket.socket) -> tuple[socket.socket, Any]:
            self._take("accept", errno.EMFILE)
            return accept(listener)

        monkeypatch.setattr(loop, "add_reader", watch)
        monkeypatch.setattr(socket.socket, "accept", take)

    def _take(self, what: str, error: int) -> None:
        if self.left[what]:
            self.left[what] -= 1
            raise OSError(error, os.strerror(error))


def a_door(serve: Callable[[socket.socket, bytes], None]) -> Listener:
    return Listener("test", "127.0.0.1", "", 8, lambda ticket: True, serve)


async def test_a_listener_accepts_connections_after_temporary_system_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_AGAIN_S", 0.001)
    tested = a_door(lambda connected, request: connected.sendall(request))
    tested.start()
    try:
        refuses = Refuses(monkeypatch, accepts=1, watches=2)
        host, _, port = tested.address.rpartition(":")
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(bytes(REQUEST))
            assert await reader.read() == bytes(REQUEST)
        assert refuses.left == {"accept": 0, "watch": 0}
        writer.close()
        await writer.wait_closed()
    finally:
        tested.close()
        await tested.cut()


async def test_a_start_that_fails_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = a_door(lambda connected, request: None)
    with monkeypatch.context() as patch:
        Refuses(patch, accepts=0, watches=1)
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            tested.start()
        assert (tested.open, tested.address, len(os.listdir("/proc/self/fd"))) == (False, "", before)
    tested.start()
    assert tested.open
    tested.close()
    await tested.cut()


class Port:
    """Connections whose addresses a test makes up."""

    def __init__(self) -> None:
        self.listener = Listener("test", "127.0.0.1", "", 8, lambda ticket: False, lambda *_: None)
        self._theirs: list[socket.socket] = []

    def come(self, address: str, said: bytes = b"") -> socket.socket:
        """Somebody comes; the other end."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            theirs = socket.create_connection(listening.getsockname())
            ours, _ = listening.accept()
        theirs.setblocking(False)
        self._theirs.append(theirs)
        theirs.sendall(said)
        self.listener._come(ours, address)
        return theirs

    @property
    def waiting(self) -> int:
        return len(self.listener._strangers)

    async def close(self) -> None:
        for naming in list(self.listener._strangers):
            self.listener._drop(naming)
        for each in self._theirs:
            each.close()
        await self.listener.cut()


@pytest.fixture
async def port() -> AsyncIterator[Port]:
    port = Port()
    yield port
    await port.close()
    assert port.waiting == 0


def gone(theirs: socket.socket) -> bool:
    """Whether the other end has closed it."""
    try:
        return not theirs.recv(1)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


async def test_the_oldest_connection_of_an_address_is_closed_for_its_next_one(port: Port) -> None:
    other = port.come("other")
    first = port.come("one")
    rest = [port.come("one") for _ in range(EACH)]
    await until(lambda: gone(first))
    assert not any(map(gone, (other, *rest)))
    assert port.waiting == 1 + EACH


async def test_the_oldest_connection_of_the_address_with_the_most_is_closed(port: Port) -> None:
    oldest = port.come("alone")
    many = [port.come("many") for _ in range(EACH)]
    some = [port.come(f"some {number % 10}") for number in range(STRANGERS - EACH)]
    assert port.waiting == STRANGERS
    await until(lambda: gone(many[0]))
    assert not any(map(gone, (oldest, *many[1:], *some)))


async def test_a_silent_connection_is_closed_after_a_timeout(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "PATIENCE_S", 0.02)
    theirs = port.come("a", b"half of it")
    await until(lambda: gone(theirs))
    assert port.waiting == 0
