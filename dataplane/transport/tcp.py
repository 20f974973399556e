"""Bytes over plain sockets, several streams at once: `sendfile` out of the arena, `recv_into` into it.

    reader -> server: ticket (16 bytes) | stretches (4) | of each: offset (8) | count (8), little-endian
    server -> reader: the bytes of all stretches
    reader -> server: one byte: it has them all; server -> reader: one byte: they were as they were offered

A ticket is a random number that the control channel carried, so who has it may read, and only what it stands for. Each
byte of an offer is sent once: a stretch that was asked for is not given again. The bytes themselves travel in the
clear; where the network is not trusted, put them into one that is (WireGuard, for one).

The kernel sends pages, not copies of them, so bytes that are on their way are those that are in memory when they go.
That is what the last two bytes are for: an offer that ends before the first leaves the reader without the second.

What always holds: a connection that says nothing, or no ticket, is closed after a few seconds; there are never more of
them than `_CONNECTIONS`; no thread writes into memory that its reader has given up.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from dataplane.threads import stopped
from dataplane.transport.base import Memory, Transport, TransportError

STREAMS = 4
"""Connections that one read uses, where it is of that many pieces."""

_PIECE = 4 << 20  # bytes, at least, of a stream
_REQUEST, _STRETCH = struct.Struct("<16sI"), struct.Struct("<QQ")
_DONE = b"\x01"
_MOST = 4096  # stretches of a stream
_CONNECTIONS = 256
_SAY_S = 5.0  # seconds to name a ticket
_IDLE_S = 20.0  # seconds without a byte after which a stream is given up
_LOOK_S = 0.1  # seconds between looks whether a connection is still wanted
_CHUNK = 8 << 20  # bytes sent or received by one call, between which a withdrawal is noticed


@dataclass(eq=False)
class _Offered:
    memory: Memory
    taken: list[tuple[int, int]] = field(default_factory=list)
    streams: set[socket.socket] = field(default_factory=set)
    done: threading.Condition = field(default_factory=threading.Condition)
    over: bool = False


class Tcp(Transport):
    """See the module. `host`: where to listen, on any port; `told`: where others find that, if not there."""

    name = "tcp"

    def __init__(self, host: str, told: str = "") -> None:
        self._host = host
        self._told = told
        self._listener: socket.socket | None = None
        self._offers: dict[bytes, _Offered] = {}
        self._serving = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="dataplane-tcp-serve")
        self._reading = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="dataplane-tcp-read")
        self._read_from: set[socket.socket] = set()
        self._connections: set[socket.socket] = set()

    @property
    def address(self) -> str:
        if self._listener is None:
            return ""
        host, port = self._listener.getsockname()[:2]
        return f"{self._told or host}:{port}"

    async def start(self) -> None:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((self._host, 0))
            listener.listen(_CONNECTIONS)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    # serving

    def offer(self, memory: Memory) -> bytes:
        ticket = secrets.token_bytes(16)
        self._offers[ticket] = _Offered(memory)
        return ticket

    def offer_file(self, file: Memory) -> bytes:
        """See `base.SendsFiles`."""
        return self.offer(file)

    async def withdraw(self, ticket: bytes) -> None:
        offered = self._offers.pop(ticket, None)
        if offered is not None:
            await asyncio.to_thread(_end, offered)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:  # nobody more, or out of descriptors: who comes is waited for
                return
            if len(self._connections) >= _CONNECTIONS:
                connected.close()
                continue
            self._connections.add(connected)
            self._serving.submit(self._serve, connected)

    def _serve(self, connected: socket.socket) -> None:
        """In a thread: one stream, from its request to its end."""
        try:
            connected.settimeout(_SAY_S)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ticket, number = _REQUEST.unpack(_exactly(connected, _REQUEST.size))
            offered = self._offers.get(ticket)
            if offered is None or not 0 < number <= _MOST:
                return
            asked = list(_STRETCH.iter_unpack(_exactly(connected, number * _STRETCH.size)))
            if _take(offered, connected, asked):
                try:
                    connected.settimeout(_IDLE_S)
                    for offset, count in asked:
                        _send(connected, offered, offset, count)
                    _exactly(connected, len(_DONE))
                    with offered.done:
                        if not offered.over:
                            connected.send(_DONE)
                finally:
                    with offered.done:
                        offered.streams.discard(connected)
                        offered.done.notify_all()
        except (OSError, EOFError):
            pass  # the reader sees a stream that ended early, and says what is to be said
        finally:
            self._connections.discard(connected)
            connected.close()

    # reading

    async def read(
        self,
        address: str,
        ticket: bytes,
        into: memoryview,
        timeout_s: float,
        stretches: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        host, _, port = address.rpartition(":")
        if not port.isascii() or not port.isdigit() or self._listener is None:
            raise TransportError(f"tcp from {address!r}: that is no address, or this end is closed")
        shares = _shared_out([(0, len(into))] if stretches is None else stretches)
        sockets: list[socket.socket] = []
        giving_up = threading.Event()

        def over() -> bool:
            return giving_up.is_set() or self._listener is None

        def one(share: list[tuple[int, int]]) -> None:
            with _connected(host.strip("[]"), int(port), min(timeout_s, _IDLE_S), over) as stream:
                sockets.append(stream)
                self._read_from.add(stream)
                if over():
                    raise EOFError("given up")
                asked = b"".join(_STRETCH.pack(start, stop - start) for start, stop in share)
                stream.sendall(_REQUEST.pack(ticket, len(share)) + asked)
                for start, stop in share:
                    _receive(stream, into[start:stop])
                stream.sendall(_DONE)
                if stream.recv(len(_DONE)) != _DONE:
                    raise EOFError("the offer ended while it was read")

        running = [self._reading.submit(one, share) for share in shares]
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*map(asyncio.wrap_future, running))
            self._read_from.difference_update(sockets)
        except BaseException as error:
            giving_up.set()
            self._read_from.difference_update(sockets)
            for stream in list(sockets):
                with suppress(OSError):
                    stream.shutdown(socket.SHUT_RDWR)
            await stopped(running)
            if isinstance(error, OSError | EOFError | TimeoutError | ValueError | OverflowError):
                raise TransportError(f"tcp from {address}: {str(error) or 'too slow'}") from error
            raise

    async def aclose(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener.fileno())
            listener.close()
        for ticket in list(self._offers):
            await self.withdraw(ticket)
        for connected in [*self._connections, *self._read_from]:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
        await asyncio.to_thread(self._serving.shutdown)
        await asyncio.to_thread(self._reading.shutdown)


def _shared_out(stretches: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The stretches in shares of about as many bytes each, one a stream."""
    total = sum(stop - start for start, stop in stretches)
    streams = max(1, min(STREAMS, total // _PIECE))
    most, left = -(-total // streams), 0
    shares: list[list[tuple[int, int]]] = []
    for start, stop in stretches:
        while start < stop:
            if not left or len(shares[-1]) == _MOST:
                shares.append([])
                left = most
            end = min(stop, start + left)
            shares[-1].append((start, end))
            left -= end - start
            start = end
    return shares


def _connected(host: str, port: int, timeout_s: float, given_up: Callable[[], bool]) -> socket.socket:
    """A connection, by the first of a name's addresses that answers. Raises OSError, and so within `_LOOK_S` of being
    given up: who has gone does not answer at all."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for family, _, _, _, address in found[:-1]:
        try:
            return _connected_to(family, address, timeout_s, given_up)
        except ConnectionError:  # another of its addresses may be the one
            continue
    return _connected_to(found[-1][0], found[-1][4], timeout_s, given_up)


def _connected_to(
    family: int, address: tuple[Any, ...], timeout_s: float, given_up: Callable[[], bool]
) -> socket.socket:
    stream = socket.socket(family, socket.SOCK_STREAM)
    try:
        stream.setblocking(False)
        poller = select.poll()
        poller.register(stream, select.POLLOUT)
        error, left_s = stream.connect_ex(address), timeout_s
        while error == errno.EINPROGRESS and not poller.poll(_LOOK_S * 1000):
            left_s -= _LOOK_S
            if left_s <= 0 or given_up():
                raise TimeoutError("nobody answers")
        error = stream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if error == errno.EINPROGRESS else error
        if error:
            raise OSError(error, os.strerror(error))
        stream.settimeout(timeout_s)
    except BaseException:
        stream.close()
        raise
    return stream


def _receive(stream: socket.socket, into: memoryview) -> None:
    done = 0
    while done < len(into):
        count = stream.recv_into(into[done : done + _CHUNK])
        if not count:
            raise EOFError(f"the stream ended {len(into) - done} bytes early")
        done += count


def _take(offered: _Offered, stream: socket.socket, asked: Sequence[tuple[int, int]]) -> bool:
    """Whether the stream may have these stretches, which then nobody else may."""
    size = offered.memory.size
    with offered.done:
        taken = sorted([*offered.taken, *((offset, offset + count) for offset, count in asked)])
        inside = all(0 < count <= size and offset <= size - count for offset, count in asked)
        if offered.over or not inside or any(b > c for (_, b), (c, _) in pairwise(taken)):
            return False
        offered.taken = taken
        offered.streams.add(stream)
        return True


def _send(stream: socket.socket, offered: _Offered, offset: int, count: int) -> None:
    memory = offered.memory
    while count and not offered.over:
        _writable(stream)
        sent = os.sendfile(stream.fileno(), memory.fd, memory.offset + offset, min(count, _CHUNK))
        if not sent:
            raise EOFError("the memory ended")
        offset, count = offset + sent, count - sent


def _writable(stream: socket.socket) -> None:
    """Wait until the stream takes more: with a timeout Python's sockets do not block, and sendfile fails."""
    poller = select.poll()
    poller.register(stream, select.POLLOUT)
    if not poller.poll(_IDLE_S * 1000):
        raise TimeoutError("the reader takes nothing")


def _end(offered: _Offered) -> None:
    """Nobody reads the memory any more when this returns."""
    with offered.done:
        offered.over = True
        for stream in offered.streams:
            with suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        offered.done.wait_for(lambda: not offered.streams)


def _exactly(stream: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = stream.recv(count - len(data))
        if not more:
            raise EOFError("the stream ended")
        data += more
    return data
