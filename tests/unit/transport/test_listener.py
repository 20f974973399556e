"""Where a transport listens: who comes while the system refuses to accept, or to watch, comes in later."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest

from dataplane.transport import listener
from dataplane.transport.listener import Listener
from dataplane.transport.unauthenticated import HEAD


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


def a_door(serve: Callable[[socket.socket], None]) -> Listener:
    return Listener("test", "127.0.0.1", "", 8, lambda ticket: True, serve)


async def test_a_listener_accepts_connections_after_temporary_system_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_AGAIN_S", 0.001)
    tested = a_door(lambda connected: connected.sendall(connected.recv(HEAD)))
    tested.start()
    try:
        refuses = Refuses(monkeypatch, accepts=1, watches=2)
        host, _, port = tested.address.rpartition(":")
        async with asyncio.timeout(60):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(bytes(HEAD))
            assert await reader.read() == bytes(HEAD)
        assert refuses.left == {"accept": 0, "watch": 0}
        writer.close()
        await writer.wait_closed()
    finally:
        tested.close()
        await tested.cut()


async def test_a_start_that_fails_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = a_door(lambda connected: None)
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
