"""Messages in a stream of bytes: each is its length, four bytes little-endian, and that many bytes of MessagePack.

What always holds: no more than `MAX_FRAME` bytes and one read's worth are ever kept of a message that is not
complete, and a length is checked before anything is kept for it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from dataplane.errors import ProtocolMismatch
from dataplane.wire.boundary import encoded
from dataplane.wire.messages import MAX_FRAME, Message

_LENGTH = struct.Struct("<I")


def frame(message: Message) -> bytes:
    """The message as it goes onto the wire. Raises LimitExceeded where it is larger than a reader takes, Misuse where
    it holds what no message can."""
    buffer = encoded(message, room=_LENGTH.size)
    _LENGTH.pack_into(buffer, 0, len(buffer) - _LENGTH.size)
    return bytes(buffer)


class Framer:
    """Cuts what arrives into the bytes of messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    @property
    def held(self) -> int:
        """Bytes that are kept of messages that were not given out."""
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that `data` completes. Raises ProtocolMismatch for a length that nobody may send."""
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
        """Nothing more comes: keep nothing. Who goes through the messages of `feed` finds no more."""
        self._buffer = bytearray()


def _is_one(data: bytes) -> bool:
    """Whether this is one message and no more, as most reads are."""
    nbytes = len(data) - _LENGTH.size
    return 0 <= nbytes <= MAX_FRAME and nbytes == _LENGTH.unpack_from(data)[0]
