"""Passing bytes between connections and ZeroMQ: all of them, in order, and both ends together; and for whom not."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from dataplane.wire import loopback
from dataplane.wire.loopback import Relay, address_of, heard_at, listening, private_name, reached_by
from tests.cases import each_case

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Behind:
    """Where a relay leads: a server behind it, whose connections a test takes."""

    def __init__(self) -> None:
        self.came: asyncio.Queue[Stream] = asyncio.Queue()
        self.name = private_name()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(lambda r, w: self.came.put_nowait((r, w)), "\0" + self.name)

    async def aclose(self) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()


@pytest.fixture
async def behind() -> AsyncIterator[Behind]:
    behind = Behind()
    await behind.start()
    yield behind
    await behind.aclose()


@pytest.fixture
async def relay(behind: Behind) -> AsyncIterator[tuple[Relay, str]]:
    listener = listening("tcp://127.0.0.1:0")
    address = address_of(listener)
    relay = heard_at(listener, behind.name)
    yield relay, address
    relay.close()
    relay.close()
    await asyncio.sleep(0)


async def opened(address: str) -> Stream:
    host, port = address.removeprefix("tcp://").split(":")
    return await asyncio.open_connection(host, int(port))


async def closed(*streams: Stream) -> None:
    for _, writer in streams:
        writer.close()
    await asyncio.gather(*(writer.wait_closed() for _, writer in streams), return_exceptions=True)


async def test_all_bytes_arrive_in_order_however_slowly_they_are_taken(
    relay: tuple[Relay, str], behind: Behind
) -> None:
    """And little of them lies in this process meanwhile: who sends waits."""
    ours = await opened(relay[1])
    theirs = await behind.came.get()
    sent = os.urandom(1 << 20) * 24
    for writer, reader in ((ours[1], theirs[0]), (theirs[1], ours[0])):
        writer.write(sent)
        sending = asyncio.create_task(writer.drain())
        await asyncio.sleep(0.02)
        assert not sending.done()
        assert await reader.readexactly(len(sent)) == sent
        await sending
    await closed(ours, theirs)


@pytest.mark.parametrize("first", [0, 1])
async def test_both_ends_close_together_with_what_was_said_last(
    relay: tuple[Relay, str], behind: Behind, first: int
) -> None:
    ours = await opened(relay[1])
    pair = (ours, await behind.came.get())
    pair[first][1].write(b"the last")
    await closed(pair[first])
    assert await pair[1 - first][0].read() == b"the last"
    await closed(pair[1 - first])


async def test_it_hears_who_comes_as_soon_as_the_system_lets_it(
    relay: tuple[Relay, str], behind: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can not accept once, and then not watch twice."""
    loop, left = asyncio.get_running_loop(), {"accept": 1, "watch": 2}
    add_reader, accept = loop.add_reader, socket.socket.accept

    def take(what: str, error: int) -> None:
        if left[what]:
            left[what] -= 1
            raise OSError(error, os.strerror(error))

    def watching(fd: int, callback: Callable[..., None], *args: Any) -> None:
        if callback == relay[0]._accept:
            take("watch", errno.ENOSPC)
        add_reader(fd, callback, *args)

    def accepting(listener: socket.socket) -> tuple[socket.socket, Any]:
        take("accept", errno.EMFILE)
        return accept(listener)

    monkeypatch.setattr(loopback, "_AGAIN_S", 0.001)
    monkeypatch.setattr(loop, "add_reader", watching)
    monkeypatch.setattr(socket.socket, "accept", accepting)
    async with asyncio.timeout(60):
        ours = await opened(relay[1])
        theirs = await behind.came.get()
    assert left == {"accept": 0, "watch": 0}
    await closed(ours, theirs)


async def test_those_who_have_gone_take_no_place_from_who_comes(
    relay: tuple[Relay, str], behind: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After as many at once as there may be, too; one more is closed at once."""
    monkeypatch.setattr(loopback, "_MOST", 3)
    async with asyncio.timeout(60):
        for _ in range(3):
            pairs = []
            for _ in range(3):
                pairs.append((await opened(relay[1]), await behind.came.get()))
                while relay[0]._tasks:  # else it would count for two
                    await asyncio.sleep(0)
            refused = await opened(relay[1])
            assert await refused[0].read() == b""
            await closed(refused)
            for i, (ours, theirs) in enumerate(pairs):
                first, last = (ours, theirs) if i % 2 else (theirs, ours)
                await closed(first)
                assert await last[0].read() == b""
                await closed(last)
            while relay[0]._ends:  # both of its own ends hear of it in a turn of the loop each
                await asyncio.sleep(0)


@each_case("address", ["tcp://192.0.2.1:9", "tcp://127.0.0.1:1", "tcp://no-such-host.invalid:1"])
async def test_who_is_not_there_or_on_another_host_is_not_reached(address: str) -> None:
    name = private_name()
    relay = reached_by(name, address)
    try:
        reader, writer = await asyncio.open_unix_connection("\0" + name)
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        await closed((reader, writer))
    finally:
        relay.close()


async def test_bytes_that_are_read_before_both_ends_are_joined_are_passed_on(
    relay: tuple[Relay, str], behind: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a Python that goes on reading after `pause_reading` in `connection_made` (gh-103607)."""
    monkeypatch.setattr(loopback._End, "connection_made", lambda end, transport: setattr(end, "transport", transport))
    host, port = relay[1].removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as ours:
        ours.sendall(b"greeting")
        theirs = await behind.came.get()
        assert await theirs[0].readexactly(8) == b"greeting"
    await closed(theirs)
