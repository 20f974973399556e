"""Messages in a byte stream: each is a length (four bytes, little-endian) and that many bytes of MessagePack.

Invariants: of an incomplete message at most `MAX_FRAME` bytes are kept, plus one read; a length is validated before
memory is used for its message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from dataplane.errors import ProtocolMismatch
from dataplane.wire.boundary import encoded
from dataplane.wire.messages import MAX_FRAME, Message

_LENGTH = struct.Struct("<I")


def frame(message: Message) -> bytes:
    """The encoded message with its length. Raises LimitExceeded if it is larger than a reader accepts, Misuse if it
    contains a value that no message can contain."""
    buffer = encoded(message, room=_LENGTH.size)
    _LENGTH.pack_into(buffer, 0, len(buffer) - _LENGTH.size)
    return bytes(buffer)


class Framer:
    """Splits received bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that `data` completes. Raises ProtocolMismatch for an invalid length."""
        if not self._buffer and _is_one(data):
            yield data[_LENGTH.size :]
            return
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(self._buffer, start)
                if size > MAX_FRAME:
                    raise ProtocolMismatch(f"a message announced {size} bytes; {MAX_FRAME} is the most")
                end = start + _LENGTH.size + size
                if len(self._buffer) < end:
                    break
                body = bytes(self._buffer[start + _LENGTH.size : end])
                start = end
                yield body
        finally:
            del self._buffer[:start]

    def clear(self) -> None:
        """Drop all kept bytes, since no more will arrive. An iteration over the messages of `feed` ends."""
        self._buffer = bytearray()


def _is_one(data: bytes) -> bool:
    """Whether this is exactly one message, as most reads are."""
    nbytes = len(data) - _LENGTH.size
    return 0 <= nbytes <= MAX_FRAME and nbytes == _LENGTH.unpack_from(data)[0]
