"""Bytes over plain sockets, several streams at once: out of the arena, or a file, and into the arena; see `sockets`.

    reader -> server: ticket (16 bytes) | ranges (4) | of each: offset (8) | count (8), little-endian
    server -> reader: the bytes of all ranges
    reader -> server: one byte: it has them all; server -> reader: one byte: they were as they were offered

A ticket is a random number that the control channel carried, so who has it may read, and only what it stands for. Each
byte of an offer is sent once: a range that was asked for is not given again. The bytes themselves travel in the
clear; where the network is not trusted, put them into one that is (WireGuard, for one).

The kernel sends pages, not copies of them, so bytes that are on their way are those that are in memory when they go.
That is what the last two bytes are for: an offer that ends before the first leaves the reader without the second.

Invariants: a connection that says nothing, or no ticket, is closed after a few seconds, and takes no place from one
that has named a ticket (`transport.unauthenticated`); there are never more of those than `_CONNECTIONS`; no thread
writes into memory that its reader has given up.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress

import numpy as np

from dataplane.threads import Pool, stopped
from dataplane.transport.base import Memory, Transport, TransportError
from dataplane.transport.listener import Listener
from dataplane.transport.offers import DONE, Asked, Offered
from dataplane.transport.sockets import connect, exactly, receive, send

STREAMS = 4
"""Connections that one read uses, if it has as many pieces."""

_PIECE = 4 << 20  # bytes, at least, of a stream
_REQUEST, _RANGE = struct.Struct("<16sI"), 16  # bytes of a range: offset and count
_MOST = 1 << 16  # ranges of a stream
_CONNECTIONS = 256
_SAY_S = 5.0  # seconds to name a ticket
_IDLE_S = 20.0  # seconds without a byte after which a stream is given up


class Tcp(Transport):
    """The transport. `host`: where to listen, on any port; `told`: the address for others, if it differs."""

    name = "tcp"

    def __init__(self, host: str, told: str = "") -> None:
        self._offers: dict[bytes, Offered] = {}
        self._listening = Listener(self.name, host, told, _CONNECTIONS, self._offers.__contains__, self._serve)
        self._files: set[Offered] = set()  # never mapped: reading a mapped file that is cut short is fatal
        self._reading = Pool(_CONNECTIONS, "dataplane-tcp-read")
        self._read_from: set[socket.socket] = set()

    @property
    def address(self) -> str:
        return self._listening.address

    async def start(self) -> None:
        self._listening.start()

    # serving

    def offer(self, memory: Memory) -> bytes:
        ticket = secrets.token_bytes(16)
        self._offers[ticket] = Offered(memory)
        return ticket

    def offer_file(self, file: Memory) -> bytes:
        """See `base.SendsFiles`."""
        ticket = secrets.token_bytes(16)
        self._offers[ticket] = Offered(file)
        self._files.add(self._offers[ticket])
        return ticket

    async def withdraw(self, ticket: bytes) -> None:
        offered = self._offers.pop(ticket, None)
        if offered is not None:
            await self._reading.aside(offered.end, 0.0)
            self._files.discard(offered)

    def _serve(self, connected: socket.socket) -> None:
        """In a thread: one stream, from its request to its end."""
        try:
            ticket, number = _REQUEST.unpack(exactly(connected, _REQUEST.size, _SAY_S))
            offered = self._offers.get(ticket)
            if offered is None or not 0 < number <= _MOST:
                return
            asked = _bounded(exactly(connected, number * _RANGE, _SAY_S), offered.memory.size)
            if asked is not None and offered.take(connected, asked):
                try:
                    connected.settimeout(_IDLE_S)
                    ranges = [(start, stop) for start, stop in asked.tolist()]
                    mapped = offered.map() if len(ranges) > 1 and offered not in self._files else None
                    send(connected, offered.memory, mapped, ranges, lambda: offered.over)
                    exactly(connected, len(DONE), _IDLE_S)
                    offered.confirm(connected)
                finally:
                    offered.leave(connected)
        except (OSError, EOFError, ValueError):
            pass  # the reader sees a stream that ended early, and reports it

    # reading

    async def read(
        self,
        address: str,
        ticket: bytes,
        into: memoryview,
        timeout_s: float,
        ranges: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        host, _, port = address.rpartition(":")
        if not port.isascii() or not port.isdigit() or not self._listening.open:
            raise TransportError(f"tcp from {address!r}: that is no address, or this end is closed")
        shares = _shared_out([(0, len(into))] if ranges is None else ranges)
        sockets: list[socket.socket] = []
        giving_up = threading.Event()

        def over() -> bool:
            return giving_up.is_set() or not self._listening.open

        def one(share: list[tuple[int, int]]) -> None:
            with connect(host.strip("[]"), int(port), min(timeout_s, _IDLE_S), over) as stream:
                sockets.append(stream)
                self._read_from.add(stream)
                if over():
                    raise EOFError("given up")
                asked = np.array(share, "<u8")
                asked[:, 1] -= asked[:, 0]
                stream.sendall(_REQUEST.pack(ticket, len(share)) + asked.tobytes())
                receive(stream, into, share)
                stream.sendall(DONE)
                if stream.recv(len(DONE)) != DONE:
                    raise EOFError("the offer ended while it was read")

        running: list[Future[None]] = []
        try:
            running.extend(self._reading.submit(one, share) for share in shares)
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
        self._listening.close()
        for ticket in list(self._offers):
            await self.withdraw(ticket)
        for connected in list(self._read_from):
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
        await self._listening.cut()
        await self._reading.aclose()


def _shared_out(ranges: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """The ranges in shares of about as many bytes each, one for each stream."""
    total = sum(stop - start for start, stop in ranges)
    streams = max(1, min(STREAMS, total // _PIECE))
    most, left = -(-total // streams), 0
    shares: list[list[tuple[int, int]]] = []
    for start, stop in ranges:
        while start < stop:
            if not left or len(shares[-1]) == _MOST:
                shares.append([])
                left = most
            end = min(stop, start + left)
            shares[-1].append((start, end))
            left -= end - start
            start = end
    return shares


def _bounded(asked: bytes, size: int) -> Asked | None:
    """The requested ranges of a memory of that size, (start, stop) each, from offset and count. None if they are
    invalid."""
    pairs = np.frombuffer(asked, "<u8").reshape(-1, 2)
    if (pairs > size).any() or not pairs[:, 1].all():
        return None
    ranges = pairs.astype(np.int64)
    ranges[:, 1] += ranges[:, 0]
    return None if (ranges[:, 1] > size).any() else ranges
