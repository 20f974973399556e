"""The listening socket of a transport, and its connections: each is served in its own thread.

A connection must name a ticket before it is served (`transport.unauthenticated`), so connections without one use no
place of those with one.

Invariants: there are never more connections than permitted; further ones are closed. Once `cut` has returned no
connection is served any more, nor waits to be.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from dataplane.threads import Pool
from dataplane.transport.unauthenticated import UnauthenticatedConnections

_AGAIN_S = 0.1  # after which a refused system call is tried again


class Listener:
    """A listening socket, on any port of `host`, which others reach at `told` if it is given. `serve(connected)` is
    called in a thread for each connection that names a ticket that is `known`, with nothing read from the socket,
    and the connection is closed when it returns. Used from one event loop."""

    def __init__(
        self,
        name: str,
        host: str,
        told: str,
        most: int,
        known: Callable[[bytes], bool],
        serve: Callable[[socket.socket], None],
    ) -> None:
        self._host = host
        self._told = told
        self._most = most
        self._serve = serve
        self._listener: socket.socket | None = None
        self._strangers = UnauthenticatedConnections(known, self._enter)
        self._inside: set[socket.socket] = set()
        self._threads = Pool(most, f"dataplane-{name}-serve")

    @property
    def open(self) -> bool:
        """Whether it accepts connections."""
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
        while True:
            try:
                connected, address = listener.accept()
            except (BlockingIOError, ConnectionError):  # no more connections
                return
            except OSError:  # out of descriptors, most likely: the connection waits
                asyncio.get_running_loop().remove_reader(listener.fileno())
                self._pause(listener)
                return
            self._strangers.come(connected, str(address[0]))

    def _enter(self, connected: socket.socket) -> None:
        if len(self._inside) >= self._most:
            connected.close()
            return
        self._inside.add(connected)
        try:
            self._threads.submit(self._in, connected)
        except OSError:  # no thread can be started: the client may try again
            self._inside.discard(connected)
            connected.close()

    def _in(self, connected: socket.socket) -> None:
        try:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._serve(connected)
        except OSError:
            pass  # it has gone
        finally:
            self._inside.discard(connected)
            connected.close()

    def close(self) -> None:
        """Accept no more."""
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener.fileno())
            listener.close()
            self._strangers.close()

    async def cut(self) -> None:
        """Disconnect all connections."""
        for connected in list(self._inside):
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
        await self._threads.aclose()
