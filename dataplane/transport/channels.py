"""Transports over sockets: a socket opens and ends each read, and a channel carries its bytes: a connection of a
library beside the socket, or the socket itself (`tcp`).

    reader -> server: ticket (16 bytes) | ranges (4) | of each: start (8) | stop (8), little-endian
    server -> reader: one byte: granted
    both, on a new connection: the parameters of the two ends of the channel
    by the channel: the bytes of all ranges
    reader -> server: one byte: it has them all; server -> reader: one byte: the offer was still valid

and again for the next read. So the library sees only peers that have sent a ticket, and each end is notified at once,
by the socket, if the other has stopped. The last two bytes protect reads that the owner cannot stop (RDMA, or another
process's memory): if the offer has ended, the reader does not get the second byte, and discards its bytes. An offer
ends when its readers have ended, or were asked to end and then disconnected.

A channel is used by one thread at a time, and has its own worker of the library: a stalled channel delays no other, and
closing it stops its transfers. Making a channel takes 10 to 25 ms, so at most `kept` of them are kept for `_KEPT_S`
seconds, for the next read from the same address.

Invariants: a connection that sends no valid ticket is closed after a few seconds, and never displaces one that has sent
a ticket (`transport.listener`); at most `_CONNECTIONS` of the latter exist; no channel writes into memory that its
reader has given up.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import secrets
import select
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from dataplane.threads import Pool, stopped
from dataplane.transport.listener import Listener
from dataplane.transport.offers import DONE, OfferedMemory
from dataplane.transport.sockets import IDLE_S, ByteRange, Memory, connect, exactly, mapping

log = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]

_REQUEST, _RANGE, _LENGTH = struct.Struct("<16sI"), struct.Struct("<QQ"), struct.Struct("<I")
_GRANTED = b"\x02"
_MOST = 1 << 14  # ranges of a request
_TOLD = 1 << 20  # bytes that one end of a channel tells the other
_CONNECTIONS = 256
_SAY_S = 5.0  # seconds for a request
_KEPT_S = 20.0
_PIECE = 4 << 20  # bytes, at least, of a connection's share


class TransportError(Exception):
    """The read failed, perhaps after a part of the bytes; the contents of the target are invalid."""


class DataChannel(ABC):
    """One connection of a library, beside one socket. Used by one thread at a time. Its methods raise OSError or
    EOFError, at the latest soon after the socket was shut down; the caller then closes it."""

    @abstractmethod
    def give(self, offered: OfferedMemory, ranges: Sequence[tuple[int, int]]) -> None:
        """Send the other end these ranges, (start, stop), until it has confirmed them on the socket."""

    @abstractmethod
    def take(self, into: memoryview, ranges: Sequence[tuple[int, int]]) -> None:
        """Fill these ranges. When this returns, or raises and the channel was closed, nothing writes there any more."""

    @abstractmethod
    def close(self) -> None:
        """Stop its transfers and close it. Idempotent."""


@dataclass(eq=False)
class _Connection:
    """A connection to a server, and its channel once there is one."""

    address: str
    stream: socket.socket
    channel: DataChannel | None = None
    since: float = 0.0

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()
        self.stream.close()

    def fresh(self) -> bool:
        poller = select.poll()
        poller.register(self.stream, select.POLLIN | select.POLLRDHUP)
        return time.monotonic() - self.since < _KEPT_S / 2 and not poller.poll(0)


class _Attempt:
    """A read that another thread can cancel."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stream: socket.socket | None = None
        self.over = False
        self.reading = False

    def use(self, stream: socket.socket | None) -> None:
        """This connection ends if the attempt is cancelled. Raises EOFError if it was."""
        with self._lock:
            if self.over:
                raise EOFError("given up")
            self._stream = stream

    def give_up(self, how: int = socket.SHUT_RDWR) -> None:
        """End it, or (SHUT_WR) ask the server to end it, if it is already reading."""
        with self._lock:
            self.over = True
            if self._stream is not None:
                with suppress(OSError):
                    self._stream.shutdown(how if self.reading else socket.SHUT_RDWR)


class Transport(ABC):
    """One way to move bytes: one side offers a range of memory, the other reads it, once. A subclass defines how a
    channel is made. The offer is a ticket, a few bytes that the control channel carries. A transport knows nothing of
    shards: it reports errors, and the control channel knows which peers are alive. Created and used in one event loop.
    `host`: the address to listen on, at any port; `told`: the address for others, if it differs."""

    name: str
    """Its name in settings and messages."""
    streams = 1
    """Connections that one read uses, if it has as many pieces."""
    at_once = 3
    """Reads of one address: of libraries more are no faster, and need more workers (measured: decision 0017)."""
    kept = 64
    """Connections that are kept for the next read, at most."""
    patience_s = 0.5
    """Seconds that a reader has to stop when an offer ends."""
    sends_files = False
    """Whether it also sends files from disk."""

    def __init__(self, host: str, told: str = "") -> None:
        self._offers: dict[bytes, OfferedMemory] = {}
        self._listening = Listener(self.name, host, told, _CONNECTIONS, self._offers.__contains__, self._serve)
        self._reading = Pool(_CONNECTIONS, f"dataplane-{self.name}-read")
        self._attempts: set[_Attempt] = set()
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._kept: list[_Connection] = []
        self._keeping = threading.Lock()

    @abstractmethod
    def _prepare(self) -> None:
        """In a thread: check that channels can be made here. Raises OSError that names the missing part."""

    @abstractmethod
    def _channel(self, stream: socket.socket) -> DataChannel:
        """In a thread: make this end of a channel, while the other end is made: `tell` it this end's parameters."""

    @property
    def address(self) -> str:
        """Its address, in its own form; the control channel passes it to other nodes."""
        return self._listening.address

    async def start(self) -> None:
        """Begin to serve. Raises OSError."""
        await self._reading.aside(self._prepare)
        self._listening.start()

    # serving

    def offer(self, memory: Memory) -> bytes:
        """A ticket to read this memory once. The memory must not change until the offer is withdrawn."""
        return self._offer(OfferedMemory(memory))

    def offer_file(self, file: Memory) -> bytes:
        """As `offer`, for a file on disk, if it `sends_files`. The file may be deleted meanwhile, and its contents may
        be damaged: the reader has to check them."""
        return self._offer(OfferedMemory(file, on_disk=True))

    def _offer(self, offered: OfferedMemory) -> bytes:
        ticket = secrets.token_bytes(16)
        self._offers[ticket] = offered
        return ticket

    async def withdraw(self, ticket: bytes) -> None:
        """End the offer. When this returns, no reader reads the memory any more. An unknown ticket is ignored."""
        offered = self._offers.pop(ticket, None)
        if offered is not None:
            await self._reading.aside(offered.end, self.patience_s)

    def _serve(self, connected: socket.socket, request: bytes) -> None:
        """In a thread: one connection, from its first request to its end."""
        channel = None
        try:
            while (claim := self._claim(connected, request)) is not None:
                offered, asked = claim
                try:
                    connected.sendall(_GRANTED)
                    channel = channel or self._channel(connected)
                    channel.give(offered, asked)
                    exactly(connected, len(DONE))
                    offered.confirm(connected)
                except BaseException:
                    if channel is not None:
                        channel.close()
                    raise
                finally:
                    offered.leave(connected)
                if not _asks(connected, _KEPT_S):
                    break
                request = exactly(connected, _REQUEST.size, _SAY_S)
        except (OSError, EOFError, ValueError) as error:  # the reader sees a read that ended early, and says so
            log.info("a connection of %s ended: %s", self.name, error)
        finally:
            if channel is not None:
                channel.close()

    def _claim(self, connected: socket.socket, request: bytes) -> tuple[OfferedMemory, list[tuple[int, int]]] | None:
        ticket, number = _REQUEST.unpack(request)
        offered = self._offers.get(ticket)
        if offered is None or not 0 < number <= _MOST:
            return None
        asked = list(_RANGE.iter_unpack(exactly(connected, number * _RANGE.size, _SAY_S)))
        bounds = np.array(asked, np.uint64)
        if (bounds > offered.memory.size).any() or not offered.take(connected, bounds.astype(np.int64)):
            return None
        return offered, asked

    # reading

    async def read(
        self,
        address: str,
        ticket: bytes,
        into: memoryview,
        timeout_s: float,
        ranges: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Fill `into`, which has the size of the memory offered at that address, or these ranges of it, (start, stop),
        ascending and disjoint. Raises TransportError. When this returns, raises or is cancelled, nothing writes there
        any more."""
        shares = _shared_out([(0, len(into))] if ranges is None else ranges, self.streams)
        if not self._listening.open or len(ticket) != 16:
            raise TransportError(f"{self.name} from {address!r}: this end is closed, or that is no ticket")
        turn = self._turns.setdefault(address, asyncio.Semaphore(self.at_once))
        try:
            async with asyncio.timeout(timeout_s), turn:
                await self._carried(address, ticket, into, shares)
        except TimeoutError as error:
            raise TransportError(f"{self.name} from {address}: too slow") from error

    async def _carried(
        self, address: str, ticket: bytes, into: memoryview, shares: Sequence[Sequence[ByteRange]]
    ) -> None:
        attempts = [_Attempt() for _ in shares]
        running: list[Future[None]] = []

        def give_up(how: int) -> None:
            for attempt in attempts:
                attempt.give_up(how)

        self._attempts.update(attempts)
        try:
            for attempt, share in zip(attempts, shares, strict=True):
                running.append(self._reading.submit(self._read, attempt, address, ticket, into, share))
            await asyncio.gather(*map(asyncio.wrap_future, running))
        except BaseException as error:
            give_up(socket.SHUT_WR)
            cut = asyncio.get_running_loop().call_later(self.patience_s, give_up, socket.SHUT_RDWR)
            await stopped(running)
            cut.cancel()
            if isinstance(error, OSError | EOFError | TimeoutError | ValueError | OverflowError):
                raise TransportError(f"{self.name} from {address}: {str(error) or 'too slow'}") from error
            raise
        finally:
            self._attempts.difference_update(attempts)

    def _read(
        self, attempt: _Attempt, address: str, ticket: bytes, into: memoryview, asked: Iterable[ByteRange]
    ) -> None:
        """In a thread: the share of a read that one connection has."""
        connection = self._connect(attempt, address)
        try:
            ranges = iter(asked)
            while part := list(islice(ranges, _MOST)):
                connection.stream.settimeout(IDLE_S)
                connection.stream.sendall(_REQUEST.pack(ticket, len(part)) + np.array(part, "<u8").tobytes())
                exactly(connection.stream, len(_GRANTED), IDLE_S)
                attempt.reading = True
                connection.channel = connection.channel or self._channel(connection.stream)
                connection.channel.take(into, part)
                attempt.reading = False
                connection.stream.sendall(DONE)
                exactly(connection.stream, len(DONE), IDLE_S)
            attempt.use(None)
        except BaseException:
            connection.close()
            raise
        self._keep(connection)

    def _connect(self, attempt: _Attempt, address: str) -> _Connection:
        """A connection to that address, an existing one if there is one."""
        stale = self._swept()
        with self._keeping:
            connection = next((kept for kept in reversed(self._kept) if kept.address == address), None)
            if connection is not None:
                self._kept.remove(connection)
        for each in stale:
            each.close()
        if connection is None:
            host, _, port = address.rpartition(":")
            if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
                raise ValueError("that is no address")
            stream = connect(host.strip("[]"), int(port), IDLE_S, lambda: attempt.over)
            connection = _Connection(address, stream)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            attempt.use(connection.stream)
        except EOFError:
            connection.close()
            raise
        return connection

    def _keep(self, connection: _Connection) -> None:
        connection.since = time.monotonic()
        with self._keeping:
            if self._listening.open and len(self._kept) < self.kept:
                self._kept.append(connection)
                return
        connection.close()

    def _swept(self) -> list[_Connection]:
        """Remove the kept connections that cannot be used any more, and return them."""
        with self._keeping:
            fresh = [(kept, kept.fresh()) for kept in self._kept]
            self._kept = [kept for kept, good in fresh if good]
        return [kept for kept, good in fresh if not good]

    async def aclose(self) -> None:
        """Stop serving; readers get TransportError. Idempotent."""
        self._listening.close()
        for attempt in list(self._attempts):
            attempt.give_up()
        await asyncio.gather(*(self.withdraw(ticket) for ticket in list(self._offers)))
        await self._listening.cut()
        await self._reading.aclose()
        with self._keeping:
            kept, self._kept = self._kept, []
        for connection in kept:
            await asyncio.to_thread(connection.close)


def _shared_out(ranges: Sequence[ByteRange], streams: int) -> list[list[ByteRange]]:
    """The ranges, in one share of about equal size for each connection."""
    total = sum(stop - start for start, stop in ranges)
    most, left = -(-total // max(1, min(streams, total // _PIECE))), 0
    shares: list[list[ByteRange]] = []
    for start, stop in ranges:
        while start < stop:
            if not left:
                shares.append([])
                left = most
            end = min(stop, start + left)
            shares[-1].append((start, end))
            left -= end - start
            start = end
    return shares


def tell(stream: socket.socket, what: bytes) -> None:
    """Send parameters of at most a megabyte to the other end of a channel, which reads them with `told`."""
    stream.sendall(_LENGTH.pack(len(what)) + what)


def told(stream: socket.socket) -> bytes:
    """Receive the bytes that the other end sends with `tell`."""
    (length,) = _LENGTH.unpack(exactly(stream, _LENGTH.size))
    if length > _TOLD:
        raise ValueError(f"{length} bytes to tell")
    return exactly(stream, length)


def agree(stream: socket.socket, version: str) -> None:
    """Check that the other end has the same version of the library, which may end the process if an unknown version
    connects. Raises OSError."""
    tell(stream, version.encode())
    other = told(stream).decode("ascii", "replace")
    if other != version:
        raise OSError(f"version {other!r} of the library there, {version!r} here")


def heard(stream: socket.socket, within_s: float = 0.0) -> bool:
    """Whether a byte is in the socket, or arrives in time. Raises EOFError if the other end is gone."""
    if not _ready(stream, within_s):
        return False
    if not stream.recv(1, socket.MSG_PEEK):
        raise EOFError("the other end has closed the connection")
    return True


def _asks(stream: socket.socket, within_s: float) -> bool:
    """Whether the other end sends another request in time, and has not gone."""
    return _ready(stream, within_s) and bool(stream.recv(1, socket.MSG_PEEK))


def _ready(stream: socket.socket, within_s: float) -> bool:
    poller = select.poll()
    poller.register(stream, select.POLLIN)
    return bool(poller.poll(within_s * 1000))


@contextmanager
def mapped(memory: Memory) -> Iterator[Bytes]:
    """A context with the memory mapped for reading. Views that remain keep it mapped."""
    file = mapping(memory)
    try:
        yield np.frombuffer(file, np.uint8)[memory.offset % mmap.ALLOCATIONGRANULARITY :]
    finally:
        with suppress(BufferError):
            file.close()
