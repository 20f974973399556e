"""Connections that have not named a ticket yet: few, and for a short time.

Who comes to a transport's port says first what he comes for (16 bytes of a ticket that the control channel carried, and
a count). Until then he is a stranger, and may have come to be in the way. Strangers wait here, where one costs a
descriptor and no thread, apart from the places of those who have a ticket. So however many come, they take nothing from
who reads: beyond the bounds the oldest goes, of the address that most have come from, since who has a ticket says so at
once.

What always holds: no more than `MOST` wait, `EACH` from one address, each for `PATIENCE_S`; nothing that one says is
taken from the socket; whom `known` does not know is closed.
"""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

MOST, EACH = 128, 64
"""Strangers in all, and from one address."""

PATIENCE_S = 5.0
"""Seconds to name a ticket."""

TICKET = 16
HEAD = TICKET + 4
"""Bytes of what is said first: a ticket, and a count."""


class Strangers:
    """Those of one port. To be used from one event loop."""

    def __init__(self, known: Callable[[bytes], bool], enter: Callable[[socket.socket], None]) -> None:
        """`known(ticket)`: whether it is good; `enter(connected)`: called with who has named one."""
        self._known = known
        self._enter = enter
        self._waiting: dict[socket.socket, tuple[str, asyncio.TimerHandle]] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._waiting)

    def come(self, connected: socket.socket, address: str) -> None:
        """Somebody has come from this address. The socket is theirs now."""
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
        """Let in who has named a ticket, close who has named none that is good; whether it was one of both."""
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
        """All go."""
        for connected in list(self._waiting):
            self._drop(connected)
