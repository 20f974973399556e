"""Pins for a forked child: a connection of its own, made before the fork, that holds what the parent's holds.

A child shares the views of its parent. Without pins of its own, the bytes would change under it as soon as the parent
drops its views. The child's copies of the views drop the pins of this connection one by one, as the parent's do those
of its own. What always holds: making it is bounded in time, and leaves nothing when it fails.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress

import msgspec

from dataplane.errors import DataplaneError
from dataplane.wire import messages as m
from dataplane.wire.framing import Framer, frame
from dataplane.wire.local import connect, parse_address

_ANSWER_S = 5.0
_READ = 64 << 10
_decoder = msgspec.msgpack.Decoder(m.Reply)


def inherit(address: str, token: bytes) -> socket.socket | None:
    """A connection that holds the pins of the client of this token; None where the node does not give one in time."""
    with suppress(DataplaneError, OSError, msgspec.MsgspecError):
        connected = connect(parse_address(address))
        try:
            if _inherited(connected, token):
                connected.setblocking(False)
                return connected
            connected.close()
        except BaseException:
            connected.close()
            raise
    return None


def _inherited(connected: socket.socket, token: bytes) -> bool:
    connected.settimeout(_ANSWER_S)
    label = f"child of {os.path.basename(sys.argv[0] if sys.argv and sys.argv[0] else 'python')}"
    connected.sendall(frame(m.Hello(1, m.MAJOR, m.MINOR, label, False)) + frame(m.InheritPins(2, token)))
    framer = Framer()
    while data := connected.recv(_READ):
        for body in framer.feed(data):
            reply = _decoder.decode(body)
            if isinstance(reply, m.Failure):
                return False
            if isinstance(reply, m.Done):
                return True
    return False
