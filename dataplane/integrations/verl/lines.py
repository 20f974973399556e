"""Requests to TransferQueue's controller from event loops: a connection a loop, with many requests under way.

TransferQueue's client lends a socket to one request at a time, sixteen of them, and each is ZeroMQ's own way into an
event loop. Here requests of a loop go out as they come, and the controller, which has one thread, answers a connection
in order.

What always holds: the n-th answer of a connection is that of its n-th request, whoever still waits for it; a connection
that has failed, or has kept a request waiting too long, answers nobody any more, and the next request makes another; a
loop that was closed leaves no connection.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from dataplane.errors import Closed, Corrupt, PeerUnavailable
from dataplane.integrations.verl import zmtp

_READ = 1 << 18  # bytes at a time


class Lines:
    """The connections of a process, a loop each. Any loop may ask."""

    def __init__(self, address: tuple[str, int], identity: str, answer_s: float) -> None:
        """address: of the controller. identity: what the names of connections begin with. answer_s: seconds that an
        answer may take."""
        self._address = address
        self._identity = identity
        self._answer_s = answer_s
        self._lines: dict[asyncio.AbstractEventLoop, _Line] = {}
        self._opening: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}
        self._lock = threading.Lock()
        self._closed = False

    async def ask(self, frames: Sequence[Any]) -> list[bytes]:
        """The answer to a request. Raises PeerUnavailable, Closed. Cancelled, the request is done all the same."""
        line: _Line | None = None
        try:
            async with asyncio.timeout(self._answer_s):
                line = await self._line()
                return await line.send(frames)
        except (TimeoutError, ConnectionError, Corrupt) as error:
            if line is not None:
                line.close(error)
            raise (self._ended() if self._closed else self._silent()) from error

    async def _line(self) -> _Line:
        loop = asyncio.get_running_loop()
        line = self._lines.get(loop)
        if line is not None and not line.closed:
            return line
        async with self._place(loop):
            line = self._lines.get(loop)
            if line is None or line.closed:  # nobody was sooner
                line = await _Line.open(loop, self._address, f"{self._identity}-{uuid4().hex[:8]}".encode())
                with self._lock:
                    if not self._closed:
                        self._lines[loop] = line
                        return line
                line.close(None)
                raise self._ended()
            return line

    def _place(self, loop: asyncio.AbstractEventLoop) -> asyncio.Lock:
        """Who has it makes this loop's connection. Those of loops that were closed are let go. Raises Closed."""
        with self._lock:
            if self._closed:
                raise self._ended()
            for other in [other for other in self._opening if other.is_closed()]:
                del self._opening[other]
                if other in self._lines:
                    self._lines.pop(other).close(None)
            return self._opening.setdefault(loop, asyncio.Lock())

    def _ended(self) -> Closed:
        return Closed("TransferQueue's client was closed: call transfer_queue.init()")

    def _silent(self) -> PeerUnavailable:
        host, port = self._address
        return PeerUnavailable(
            f"TransferQueue's controller did not answer in {self._answer_s:.0f} s, or has ended: if its actor has, or"
            " Ray was started again, call transfer_queue.close() and transfer_queue.init()",
            address=f"tcp://{host}:{port}",
        )

    def close(self) -> None:
        """End. What waits for an answer raises Closed. Idempotent."""
        with self._lock:
            self._closed = True
            lines, self._lines = list(self._lines.items()), {}
        for loop, line in lines:
            try:
                loop.call_soon_threadsafe(line.close, ConnectionAbortedError("closed"))
            except RuntimeError:  # the loop was closed
                line.close(None)


class _Line:
    """One connection. To be used from its loop alone, but for `closed`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        incoming: zmtp.Incoming,
    ) -> None:
        self._loop = loop
        self._sock = sock
        self._incoming = incoming
        self._waiting: deque[asyncio.Future[list[bytes]]] = deque()
        self._unsent = bytearray()
        self.closed = False

    @classmethod
    async def open(cls, loop: asyncio.AbstractEventLoop, address: tuple[str, int], identity: bytes) -> _Line:
        """Raises ConnectionError, Corrupt."""
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        incoming = zmtp.Incoming()
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, address)
            await loop.sock_sendall(sock, zmtp.GREETING)
            while not incoming.greeted:
                incoming.feed(await _received(loop, sock))
            await loop.sock_sendall(sock, zmtp.ready(identity))
            while not incoming.ready:
                incoming.feed(await _received(loop, sock))
        except OSError as error:
            sock.close()
            raise ConnectionError(f"no connection: {error}") from error
        except BaseException:
            sock.close()
            raise
        line = cls(loop, sock, incoming)
        loop.add_reader(sock, line._read)
        return line

    def send(self, frames: Sequence[Any]) -> asyncio.Future[list[bytes]]:
        """Send a request; what it is answered."""
        waiting: asyncio.Future[list[bytes]] = self._loop.create_future()
        self._waiting.append(waiting)
        self._write(zmtp.message(frames))
        return waiting

    def _write(self, data: bytes) -> None:
        if self._unsent:
            self._unsent += data
            return
        sent = 0
        try:
            sent = self._sock.send(data)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.close(ConnectionError(str(error)))
            return
        if sent < len(data):
            self._unsent += data[sent:]
            self._loop.add_writer(self._sock, self._go_on)

    def _go_on(self) -> None:
        try:
            del self._unsent[: self._sock.send(self._unsent)]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.close(ConnectionError(str(error)))
            return
        if not self._unsent:
            self._loop.remove_writer(self._sock)

    def _read(self) -> None:
        try:
            data = self._sock.recv(_READ)
            answers = self._incoming.feed(data)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, Corrupt) as error:
            self.close(ConnectionError(str(error)))
            return
        for answer in answers:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(answer)
        if not data:
            self.close(ConnectionResetError("TransferQueue's controller closed the connection"))

    def close(self, error: Exception | None) -> None:
        """End; what waits for an answer raises the error. Idempotent."""
        if self.closed:
            return
        self.closed = True
        with suppress(RuntimeError, ValueError):  # the loop was closed
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
        self._sock.close()
        for waiting in self._waiting:
            if error is not None and not waiting.done():
                waiting.set_exception(error)
        self._waiting.clear()


async def _received(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> bytes:
    data = await loop.sock_recv(sock, _READ)
    if not data:
        raise ConnectionResetError("TransferQueue's controller closed the connection")
    return data
