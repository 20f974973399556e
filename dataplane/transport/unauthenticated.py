"""Connections that have not named a ticket yet: few, and for a short time.

A connection to a transport's port first sends its request (16 bytes of a ticket that the control channel carried, and a
count). Until then it may be hostile. Such connections wait here, where each costs a descriptor and no thread, apart
from those with a ticket. So however many there are, they take nothing from readers: beyond the bounds the oldest is
closed, of the address with the most, since a reader names its ticket at once.

Invariants: at most `MOST` wait, `EACH` from one address, each for `PATIENCE_S`; nothing that they send is read from
the socket; one whose ticket is not `known` is closed.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

MOST, EACH = 128, 64
"""Waiting connections in all, and from one address."""

PATIENCE_S = 5.0
"""Seconds to name a ticket."""

TICKET = 16
HEAD = TICKET + 4
"""Bytes of the first message: a ticket, and a count."""


class UnauthenticatedConnections:
    """The waiting connections of one port. Used from one event loop."""

    def __init__(self, known: Callable[[bytes], bool], enter: Callable[[socket.socket], None]) -> None:
        """`known(ticket)`: whether it is valid; `enter(connected)`: called for a connection that has named one."""
        self._known = known
        self._enter = enter
        self._waiting: dict[socket.socket, tuple[str, asyncio.TimerHandle]] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._waiting)

    def come(self, connected: socket.socket, address: str) -> None:
        """A new connection from this address, which is owned here from now on."""
        loop = asyncio.get_running_loop()
        try:
            if self._look(connected):
                return
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, HEAD)  # to be woken when all of it is there
            loop.add_reader(connected.fileno(), self._said, connected)
        except OSError:
            connected.close()
            return
        timer = loop.call_later(PATIENCE_S, self._drop, connected)
        self._waiting[connected] = address, timer
        self._make_room(address)

    def _look(self, connected: socket.socket) -> bool:
        """Admit a connection with a valid ticket, close one with an invalid one. Returns whether it was either."""
        try:
            head = connected.recv(HEAD, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        if len(head) < HEAD and head:
            return False
        if head and self._known(head[:TICKET]):
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            self._enter(connected)
        else:
            connected.close()
        return True

    def _said(self, connected: socket.socket) -> None:
        self._forget(connected)
        try:
            if not self._look(connected):
                connected.close()  # it ended in the middle
        except OSError:
            connected.close()

    def _make_room(self, address: str) -> None:
        counts = Counter(come_from for come_from, _ in self._waiting.values())
        if counts[address] <= EACH and counts.total() <= MOST:
            return
        most = address if counts[address] > EACH else max(counts, key=lambda each: counts[each])
        self._drop(next(each for each, (come_from, _) in self._waiting.items() if come_from == most))

    def _forget(self, connected: socket.socket) -> None:
        _, timer = self._waiting.pop(connected)
        timer.cancel()
        asyncio.get_running_loop().remove_reader(connected.fileno())

    def _drop(self, connected: socket.socket) -> None:
        self._forget(connected)
        with suppress(OSError):
            connected.close()

    def close(self) -> None:
        """Close all."""
        for connected in list(self._waiting):
            self._drop(connected)
