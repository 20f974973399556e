"""The transport over plain sockets: the suite of all transports, and what strangers may say on its port."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
from collections.abc import AsyncIterator
from contextlib import suppress

import numpy as np
import pytest

from dataplane.transport import channels, listener
from dataplane.transport.channels import Transport, TransportError
from dataplane.transport.tcp import STREAMS, Tcp
from tests.cases import each_case
from tests.conformance.transports import KIB, MIB, PAGE, Shelf, Shelves, Target, TransportSuite, until
from tests.processes import has_ipv6


def made() -> Transport:
    return Tcp("127.0.0.1")


class TestTcp(TransportSuite):
    made = staticmethod(made)


@pytest.mark.long
@pytest.mark.skipif(not has_ipv6(), reason="there is no IPv6 here")
class TestTcpByIPv6(TransportSuite):
    def made(self) -> Transport:
        return Tcp("::1")


class Stranger:
    """A connection to the port, that says what it likes."""

    def __init__(self, server: Transport) -> None:
        host, _, port = server.address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)

    def ask(self, ticket: bytes, *ranges: tuple[int, int]) -> None:
        """For ranges, each a start and a stop."""
        asked = [struct.pack("<QQ", start, stop) for start, stop in ranges]
        self.socket.sendall(ticket + struct.pack("<I", len(ranges)) + b"".join(asked))

    def hear(self) -> bytes:
        """All that comes until the server ends the connection."""
        heard = b""
        with suppress(ConnectionResetError):
            while data := self.socket.recv(1 << 20):
                heard += data
        return heard

    def arrived(self) -> int:
        """Bytes that lie here unread."""
        return int(struct.unpack("i", fcntl.ioctl(self.socket, termios.FIONREAD, bytes(4)))[0])

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


async def reads(reader: Transport, server: Transport, one: Shelf) -> None:
    """Fails where what is offered now can not be read."""
    ticket = server.offer(one.memory)
    target = Target(len(one.content))
    await reader.read(server.address, ticket, target.memory, 60.0)
    assert np.array_equal(target.bytes, one.content)
    await server.withdraw(ticket)


STRETCHES: dict[str, list[tuple[int, int]]] = {
    "none": [],
    "too many": [(0, 1)] * 70_000,
    "one byte often": [(0, 1)] * 5000,
    "of nothing": [(0, 0)],
    "one byte more": [(0, 64 * KIB + 1)],
    "beyond": [(64 * KIB, 64 * KIB + 1)],
    "across the end": [(64 * KIB - 1, 64 * KIB + 1)],
    "very far": [(2**64 - 2, 2**64 - 1)],
    "very much": [(0, 2**64 - 1)],
    "backwards": [(10, 9)],
    "around to the beginning": [(2**64 - PAGE, 1)],
    "one good, one beyond": [(0, 1), (64 * KIB, 64 * KIB + 1)],
    "one byte twice": [(0, 10), (9, 10)],
    "one byte twice, backwards": [(9, 10), (0, 10)],
}


@each_case("what", STRETCHES)
async def test_an_out_of_bounds_range_is_refused_without_using_up_the_ticket(
    server: Tcp, reader: Tcp, shelf: Shelves, what: str
) -> None:
    one = shelf(64 * KIB)
    ticket = server.offer(one.memory)
    with Stranger(server) as stranger:
        stranger.ask(ticket, *STRETCHES[what])
        assert await asyncio.to_thread(stranger.hear) == b""
    target = Target(64 * KIB)
    await reader.read(server.address, ticket, target.memory, 60.0)
    assert np.array_equal(target.bytes, one.content)


async def test_the_number_of_connections_is_bounded(
    server: Tcp, reader: Tcp, shelf: Shelves, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server._listening, "_most", 4)
    ticket = server.offer(shelf(64 * KIB).memory)
    inside = [Stranger(server) for _ in range(4)]
    for number, each in enumerate(inside):
        each.ask(ticket, (number * PAGE, (number + 1) * PAGE))
    await until(lambda: len(server._listening._inside) == 4)
    with Stranger(server) as fifth:
        fifth.ask(ticket, (5 * PAGE, 6 * PAGE))
        assert await asyncio.to_thread(fifth.hear) == b""
    assert len(server._listening._inside) == 4
    for each in inside:
        each.socket.close()
    await until(lambda: not server._listening._inside)
    await reads(reader, server, shelf(9 * MIB))


async def test_idle_strangers_do_not_displace_readers(server: Tcp, reader: Tcp, shelf: Shelves) -> None:
    """Three hundred that say nothing, three hundred that say a part of something, and more that come as it is read."""
    one, idle = shelf(9 * MIB), list[Stranger]()

    def come(count: int) -> None:
        idle.extend(Stranger(server) for _ in range(count))

    try:
        await asyncio.to_thread(come, 600)
        for each in idle[300:]:
            with suppress(OSError):  # it may have been sent away
                each.socket.sendall(bytes(19))
        for _ in range(10):
            await asyncio.gather(asyncio.to_thread(come, 20), reads(reader, server, one))
        await until(lambda: len(server._listening._strangers) <= listener.EACH)
        await until(lambda: not server._listening._inside)  # the thread of the last read ends after the read
    finally:
        for each in idle:
            each.socket.close()
    await until(lambda: len(server._listening._strangers) == 0)


async def test_an_offer_is_withdrawn_from_a_reader_that_does_not_read(server: Tcp, shelf: Shelves) -> None:
    one = shelf(33 * MIB)
    ticket = server.offer(one.memory)
    with Stranger(server) as stranger:
        stranger.ask(ticket, (0, 33 * MIB))
        await until(stranger.arrived)
        async with asyncio.timeout(60):
            await server.withdraw(ticket)


Silent = tuple[str, list[asyncio.StreamWriter]]


@pytest.fixture
async def silent() -> AsyncIterator[Silent]:
    """An address that answers nothing, and the connections that have come."""
    came: list[asyncio.StreamWriter] = []
    listening = await asyncio.start_server(lambda _, writer: came.append(writer), "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()
    yield f"{host}:{port}", came
    listening.close()
    for writer in came:
        writer.close()


async def test_a_read_ends_when_nothing_comes(reader: Tcp, silent: Silent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "IDLE_S", 0.1)
    with pytest.raises(TransportError):
        async with asyncio.timeout(60):
            await reader.read(silent[0], bytes(16), Target(KIB).memory, 600.0)


async def test_the_end_does_not_wait_for_reads_that_stall(reader: Tcp, silent: Silent) -> None:
    target = Target(9 * MIB)
    reading = asyncio.create_task(reader.read(silent[0], bytes(16), target.memory, 600.0))
    await until(lambda: len(silent[1]) == 2)
    async with asyncio.timeout(60):
        await reader.aclose()
    (result,) = await asyncio.gather(reading, return_exceptions=True)
    assert isinstance(result, TransportError)


async def test_stalled_reads_delay_neither_withdrawals_nor_other_reads(
    server: Tcp, reader: Tcp, silent: Silent, shelf: Shelves
) -> None:
    """A host that does not answer is not the end of what comes from others. And a withdrawal ends: else whoever holds
    up a node's reads keeps its memory pinned, too."""
    targets = [np.empty(4 * STREAMS * MIB, np.uint8) for _ in range(4)]
    reading = [asyncio.create_task(reader.read(silent[0], bytes(16), memoryview(target), 600.0)) for target in targets]
    await until(lambda: len(silent[1]) == 4 * STREAMS)
    ticket = reader.offer(shelf(KIB).memory)
    others = [asyncio.create_task(each) for each in (reader.withdraw(ticket), reads(reader, server, shelf(KIB)))]
    await asyncio.wait(others, timeout=60)
    in_time = all(each.done() for each in others)
    for each in reading:
        each.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    await asyncio.gather(*others)
    assert in_time
