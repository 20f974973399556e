"""Limits for clients: the number of connections, and the time for which one may be idle.

Invariants: at most `MAX_CONNECTIONS` are open; a connection without a request in progress, because it has not sent a
whole one or no further one, is closed after `IDLE_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dataplane.clock import monotonic

if TYPE_CHECKING:
    from aiohttp import web

MAX_CONNECTIONS = 256
IDLE_S = 10.0
_SWEEP_S = 1.0


class Limits:
    """The limits of one server of aiohttp."""

    def __init__(self, server: web.Server, max_connections: int = MAX_CONNECTIONS, idle_s: float = IDLE_S) -> None:
        self._server = server
        self._max = max_connections
        self._idle_s = idle_s
        self._answering: dict[Any, int] = {}
        self._idle_since_s: dict[Any, float] = {}

    def protocol(self) -> asyncio.BaseProtocol:
        """The protocol of an accepted connection."""
        return self._server() if len(self._server.connections) < self._max else _Refused()

    @contextmanager
    def answering(self, protocol: Any) -> Iterator[None]:
        """A context in which a request of this connection is being answered."""
        self._answering[protocol] = self._answering.get(protocol, 0) + 1
        try:
            yield
        finally:
            self._answering[protocol] -= 1
            if not self._answering[protocol]:
                del self._answering[protocol]
            self._idle_since_s.pop(protocol, None)

    async def run(self, sleep: Callable[[float], Awaitable[object]] = asyncio.sleep) -> None:
        """Close idle connections, until cancelled."""
        while True:
            await sleep(_SWEEP_S)
            self.sweep(monotonic())

    def sweep(self, now_s: float) -> None:
        """Close connections that have been idle for too long."""
        connections = self._server.connections
        idle = [each for each in connections if each not in self._answering]
        self._idle_since_s = {each: self._idle_since_s.get(each, now_s) for each in idle}
        for each, since_s in self._idle_since_s.items():
            if now_s - since_s > self._idle_s:
                each.force_close()


class _Refused(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()
