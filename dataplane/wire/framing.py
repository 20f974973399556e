"""Messages in a stream of bytes: each is its length, four bytes little-endian, and that many bytes of MessagePack.

What always holds: no more than `MAX_FRAME` bytes and one read's worth are ever kept of a message that is not
complete, and a length is checked before anything is kept for it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from dataplane.errors import LimitExceeded, ProtocolMismatch
from dataplane.wire.messages import MAX_FRAME, Message

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


def frame(message: Message) -> bytes:
    """The message as it goes onto the wire. Raises LimitExceeded where it is larger than a reader takes."""
    buffer = bytearray(_LENGTH.size)
    _encoder.encode_into(message, buffer, _LENGTH.size)
    size = len(buffer) - _LENGTH.size
    if size > MAX_FRAME:
        raise LimitExceeded(
            f"a message of {size} bytes is longer than the {MAX_FRAME} that are read; ask for fewer rows at once",
            what="message",
            asked=size,
            limit=MAX_FRAME,
        )
    _LENGTH.pack_into(buffer, 0, size)
    return bytes(buffer)


class Framer:
    """Cuts what arrives into the bytes of messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that `data` completes. Raises ProtocolMismatch for a length that nobody may send."""
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
