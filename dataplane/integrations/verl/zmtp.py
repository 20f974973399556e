"""ZMTP 3.0, as far as requests to a ROUTER need it: what a ZeroMQ socket says, for plain sockets to say.

A ZeroMQ socket hands each message to a thread of its own and wakes the caller for the answer, 50 to 90 microseconds of
a round trip of 200 to 350. TransferQueue's controller is asked two or three times a put.

What always holds: messages are whole, in the order in which they were sent; what is no ZMTP raises Corrupt. Not here:
security mechanisms (the controller has none), heartbeats (it sends none), connecting again.

The specification is ZeroMQ's RFC 23.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from dataplane.errors import Corrupt

_MORE, _LONG, _COMMAND = 1, 2, 4  # flags of a frame
_SHORT, _SIZE = 255, struct.Struct(">Q")
_GREETING = 64
_MOST = 1 << 40  # bytes of a frame


GREETING = b"\xff" + bytes(7) + b"\x01\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
"""What a peer says first."""


def ready(identity: bytes) -> bytes:
    """What a DEALER of this identity says once it was greeted."""
    known = ((b"Socket-Type", b"DEALER"), (b"Identity", identity))
    properties = b"".join([bytes([len(name)]) + name + struct.pack(">I", len(value)) + value for name, value in known])
    return _frame(_COMMAND, b"\x05READY" + properties)


def message(frames: Sequence[Any]) -> bytes:
    """A message of these frames, which are bytes or buffers."""
    last = len(frames) - 1
    return b"".join([_frame(_MORE if number < last else 0, frame) for number, frame in enumerate(frames)])


def _frame(flags: int, body: Any) -> bytes:
    plain = bytes(body)
    if len(plain) <= _SHORT:
        return bytes([flags, len(plain)]) + plain
    return bytes([flags | _LONG]) + _SIZE.pack(len(plain)) + plain


class Incoming:
    """What a peer says: bytes in as they come, messages out."""

    def __init__(self) -> None:
        self._unread = bytearray()
        self.greeted = False
        """Whether the peer has said its greeting: it is to be told `ready` then."""
        self.ready = False
        """Whether it has said that it is ready: it can be sent messages then, and closes the connection for any that
        come with a greeting."""
        self._frames: list[bytes] = []

    def feed(self, data: bytes) -> list[list[bytes]]:
        """The messages that are whole with this. Raises Corrupt."""
        self._unread += data
        if not self.greeted:
            if len(self._unread) < _GREETING:
                return []
            self._greet()
        found: list[list[bytes]] = []
        place, unread = 0, self._unread
        while len(unread) >= place + 2:
            flags, size, body = unread[place], unread[place + 1], place + 2
            if flags > (_MORE | _LONG | _COMMAND):
                raise Corrupt("TransferQueue's controller sent what is no ZMTP frame")
            if flags & _LONG:
                body = place + 1 + _SIZE.size
                if len(unread) < body:
                    break
                (size,) = _SIZE.unpack_from(unread, place + 1)
            if size > _MOST:
                raise Corrupt(f"TransferQueue's controller sent a frame of {size} bytes")
            if len(unread) < body + size:
                break
            place = body + size
            if flags & _COMMAND:
                if unread[body : body + 6] == b"\x05ERROR":
                    raise Corrupt(f"TransferQueue's controller refused the connection: {bytes(unread[body:place])!r}")
                self.ready = True
                continue
            self._frames.append(bytes(unread[body:place]))
            if not flags & _MORE:
                found.append(self._frames)
                self._frames = []
        del unread[:place]
        return found

    def _greet(self) -> None:
        said = self._unread[:_GREETING]
        if said[0] != 0xFF or not said[9] & 1 or said[10] < 3 or said[12:32].rstrip(b"\0") != b"NULL":
            raise Corrupt("TransferQueue's controller speaks no ZMTP 3 without security")
        del self._unread[:_GREETING]
        self.greeted = True
