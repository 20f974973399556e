"""Pins for a forked child: its own connection, made before the fork, with the parent's pins.

A child shares the views of its parent. Without its own pins, the bytes would change under it as soon as the parent
drops its views. The child's copies of the views drop the pins of this connection one by one, as the parent's do its
own.

Invariant: a fork waits for all nodes `ANSWER_S` at most, and a connection that fails leaves nothing.

Rejected: to fork before the node has answered. The parent may drop its pins, or end, before the node has read what the
child inherits, and the child would read other bytes or none.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dataplane.clock import Deadline
from dataplane.config import program
from dataplane.errors import DataplaneError
from dataplane.wire import messages as m
from dataplane.wire.framing import Framer, frame
from dataplane.wire.local import connect, parse_address

ANSWER_S = 5.0
"""Seconds that a fork waits for the nodes of all planes together."""

_READ = 64 << 10
_decoder = m.decoder(m.Reply)


@dataclass(frozen=True, slots=True)
class InheritedPins:
    """A connection for a child, and its token, with which the child's own children inherit. Without a connection the
    node has ended, so that nobody can change what it held."""

    connected: socket.socket | None = None
    token: bytes = b""


def inherit(address: str, token: bytes, deadline: Deadline) -> InheritedPins | None:
    """A connection with the pins of the client with this token; None if the node does not answer by the deadline."""
    path = parse_address(address)
    with suppress(DataplaneError, OSError, msgspec.MsgspecError):
        if _ended(path):
            return InheritedPins()
        if not deadline.remaining_s:
            return None
        connected = connect(path, deadline.remaining_s)
        try:
            own = _inherited(connected, token, deadline)
            if own:
                connected.setblocking(False)
                return InheritedPins(connected, own)
            connected.close()
        except BaseException:
            connected.close()
            raise
    return None


def _ended(path: Path) -> bool:
    """Whether nobody listens there any more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except BlockingIOError:
            pass
        return False


def _inherited(connected: socket.socket, token: bytes, deadline: Deadline) -> bytes:
    """The new client's token; empty if it inherits nothing. Raises TimeoutError and BlockingIOError."""
    own = b""
    connected.settimeout(deadline.remaining_s)
    label = f"child of {program()}"
    connected.sendall(frame(m.Hello(1, m.MAJOR, m.MINOR, label, False)) + frame(m.InheritPins(2, token)))
    framer = Framer()
    while data := connected.recv(_READ):
        connected.settimeout(deadline.remaining_s)  # at zero it does not block
        for body in framer.feed(data):
            reply = _decoder.decode(body)
            if isinstance(reply, m.Welcome):
                own = reply.token
            elif isinstance(reply, m.Failure):
                return b""
            elif isinstance(reply, m.Done):
                return own
    return b""
