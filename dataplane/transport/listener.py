"""The listening socket of a transport, and its connections: each is served in its own thread.

A connection first sends a request: 16 bytes of a ticket that the control channel carried, and a count. Until then it
may be hostile; it costs a descriptor and no thread. Such connections are counted separately, so they take nothing from
readers: beyond the bounds, the oldest connection of the address with the most is closed, since a reader sends its
ticket at once.

Invariants: there are never more connections than permitted; further ones are closed. At most `STRANGERS` have sent no
ticket, `EACH` from one address, each for `PATIENCE_S`; a connection whose ticket is not `known` is closed. Once `cut`
has returned, no connection is served or waits.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from dataplane.threads import Pool

STRANGERS, EACH = 128, 64
"""Connections without a ticket: in all, and from one address."""
PATIENCE_S = 5.0
"""Seconds to name a ticket."""
TICKET = 16
REQUEST = TICKET + 4
"""Bytes of a request: a ticket, and a count."""

_AGAIN_S = 0.1  # after which a refused system call is tried again


class Listener:
    """A listening socket, on any port of `host`. `told`: the address for others, if it differs.
    `serve(connected, request)` is called in a thread for each connection that names a ticket that is `known`, with its
    first request, and the connection is closed when it returns. Used from one event loop."""

    def __init__(
        self,
        name: str,
        host: str,
        told: str,
        most: int,
        known: Callable[[bytes], bool],
        serve: Callable[[socket.socket, bytes], None],
    ) -> None:
        self._host = host
        self._told = told
        self._most = most
        self._known = known
        self._serve = serve
        self._listener: socket.socket | None = None
        self._strangers: dict[asyncio.Task[bytes], str] = {}  # -> the address; the oldest first
        self._inside: set[socket.socket] = set()
        self._threads = Pool(most, f"dataplane-{name}-serve")

    @property
    def open(self) -> bool:
        return self._listener is not None

    @property
    def address(self) -> str:
        """HOST:PORT for others; empty while it is closed."""
        if self._listener is None:
            return ""
        host, port = self._listener.getsockname()[:2]
        return f"{self._told or host}:{port}"

    def start(self) -> None:
        """Listen. Raises OSError."""
        listener = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.bind((self._host, 0))
            listener.listen(self._most)
            listener.setblocking(False)
            self._hear(listener)
        except BaseException:
            listener.close()
            raise
        self._listener = listener

    def _hear(self, listener: socket.socket) -> None:
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    def _pause(self, listener: socket.socket) -> None:
        """Let connections wait until accepting is tried again."""
        asyncio.get_running_loop().call_later(_AGAIN_S, self._hear_again, listener)

    def _hear_again(self, listener: socket.socket) -> None:
        if self._listener is not listener:  # closed meanwhile
            return
        try:
            self._hear(listener)
        except OSError:
            self._pause(listener)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(EACH):  # the rest in the next pass, once those beyond the bounds are closed
            try:
                connected, address = listener.accept()
            except (BlockingIOError, ConnectionError):  # no more connections
                return
            except OSError:  # out of descriptors, most likely: the connection waits
                asyncio.get_running_loop().remove_reader(listener.fileno())
                self._pause(listener)
                return
            self._come(connected, str(address[0]))

    def _come(self, connected: socket.socket, address: str) -> None:
        connected.setblocking(False)
        naming = asyncio.get_running_loop().create_task(_request(connected))
        naming.add_done_callback(partial(self._enter, connected))
        self._strangers[naming] = address
        counts = Counter(self._strangers.values())
        if counts[address] > EACH or counts.total() > STRANGERS:
            most = address if counts[address] > EACH else max(counts, key=lambda each: counts[each])
            self._drop(next(naming for naming, come_from in self._strangers.items() if come_from == most))

    def _drop(self, naming: asyncio.Task[bytes]) -> None:
        del self._strangers[naming]
        naming.cancel()

    def _enter(self, connected: socket.socket, naming: asyncio.Task[bytes]) -> None:
        """Serve a connection that has named a ticket; close one that has not."""
        self._strangers.pop(naming, None)
        request = b"" if naming.cancelled() or naming.exception() else naming.result()
        if len(request) < REQUEST or not self._known(request[:TICKET]) or len(self._inside) >= self._most:
            connected.close()
            return
        self._inside.add(connected)
        try:
            connected.setblocking(True)
            self._threads.submit(self._in, connected, request)
        except OSError:  # no thread can be started: the client may try again
            self._inside.discard(connected)
            connected.close()

    def _in(self, connected: socket.socket, request: bytes) -> None:
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._serve(connected, request)
        except OSError:
            pass  # it has gone
        finally:
            self._inside.discard(connected)
            connected.close()

    def close(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener.fileno())
            listener.close()
            for naming in list(self._strangers):
                self._drop(naming)

    async def cut(self) -> None:
        for connected in list(self._inside):
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
        await self._threads.aclose()


async def _request(connected: socket.socket) -> bytes:
    """The first request of a connection; a part of it if the connection ends early. Raises OSError, also if it takes
    too long."""
    loop, request = asyncio.get_running_loop(), b""
    async with asyncio.timeout(PATIENCE_S):
        while len(request) < REQUEST and (more := await loop.sock_recv(connected, REQUEST - len(request))):
            request += more
    return request
