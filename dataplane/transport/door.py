"""Where a transport listens, and who has come in: each is served in a thread of its own.

What always holds: there are never more inside than there may be, who comes then is sent away; once `cut` has returned
nobody is inside any more.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress


class Door:
    """A listening socket, on any port of `host`, that others find at `told`, if that is another. `serve(connected)` is
    called for each who comes, in a thread, and the connection closed when it returns. Used from one event loop."""

    def __init__(self, name: str, host: str, told: str, most: int, serve: Callable[[socket.socket], None]) -> None:
        self._host = host
        self._told = told
        self._most = most
        self._serve = serve
        self._listener: socket.socket | None = None
        self._inside: set[socket.socket] = set()
        self._threads = ThreadPoolExecutor(most, thread_name_prefix=f"dataplane-{name}-serve")

    @property
    def open(self) -> bool:
        """Whether somebody may come."""
        return self._listener is not None

    @property
    def address(self) -> str:
        """HOST:PORT by which others find it; empty while it is not open."""
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
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:  # nobody more, or out of descriptors: who comes is waited for
                return
            if len(self._inside) >= self._most:
                connected.close()
                continue
            self._inside.add(connected)
            self._threads.submit(self._in, connected)

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
        """Nobody comes any more."""
        listener, self._listener = self._listener, None
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener.fileno())
            listener.close()

    async def cut(self) -> None:
        """Who is inside is cut off."""
        for connected in list(self._inside):
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
        await asyncio.to_thread(self._threads.shutdown)
