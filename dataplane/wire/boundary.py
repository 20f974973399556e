"""The boundary where messages of other processes are handled: every request with a number is answered.

Decoding, handling and encoding may each raise, depending on the message. A channel that catches such an error gets the
answer from this module. There are two channels: the local one (`wire.local`) and the one between nodes (`wire.peer`).

Invariants: `failure` returns an encodable message for any error with any fields. `answered` returns bytes for any
reply. The number of a request is found in every body that begins like a request, even if the rest is invalid. An
unexpected error causes one log line, which names the sender and is bounded in length.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, get_args

import msgspec

from dataplane.clock import Clock, monotonic
from dataplane.errors import DataplaneError, LimitExceeded, Misuse, ProtocolMismatch, describe
from dataplane.log_lines import clipped, error_line
from dataplane.stream.packing import hook
from dataplane.wire.messages import MAX_FRAME, Failure, Message

MOST, EACH_S, SENDERS = 5, 60.0, 32

_OTHERS = "others"


class _Sender:
    """One sender, since its first line."""

    __slots__ = ("began_s", "left_out", "lines")

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.lines = self.left_out = 0


class InvalidMessageLog:
    """The lines of one logger about invalid messages. The first lines about each sender are logged, then the number of
    further ones.

    Invariants: for each sender at most `MOST` lines are logged in `EACH_S` seconds, and afterwards one line with the
    number of omitted ones; all senders after the first `SENDERS` in that time count as one sender. So no sender can
    fill a disk with log lines, even if it uses many names, and yet every invalid message is counted in some line.

    `log` may be called from the event loop or, without one, from anywhere.
    """

    def __init__(self, log: logging.Logger, clock: Clock = monotonic) -> None:
        self._log = log
        self._clock = clock
        self._senders: dict[str, _Sender] = {}

    def log(self, level: int, sender: str, text: str, *arguments: object) -> None:
        """Log a line about what this sender sent, or count it."""
        self._tell()
        if sender not in self._senders and len(self._senders) >= SENDERS:
            sender = _OTHERS
        found = self._senders.get(sender)
        if found is None:
            found = self._senders[sender] = _Sender(self._clock())
            with suppress(RuntimeError):  # without a loop, the next log line does it
                asyncio.get_running_loop().call_later(EACH_S, self._tell)
        if found.lines < MOST:
            found.lines += 1
            self._log.log(level, text, *arguments)
        else:
            found.left_out += 1

    def _tell(self) -> None:
        """For senders whose `EACH_S` seconds are over, log the count of omitted lines, and forget them."""
        now = self._clock()
        for sender, each in [(s, e) for s, e in self._senders.items() if now - e.began_s >= EACH_S]:
            del self._senders[sender]
            if each.left_out:
                self._log.warning("%s: %d more of this kind in %.0f s", sender, each.left_out, now - each.began_s)


log = logging.getLogger(__name__)
_complaints = InvalidMessageLog(log)

# the most that is sent of an error: characters of a text in a field; entries and depth of a field
_FIELD, _ENTRIES, _DEPTH = 1024, 256, 4
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1  # the integers that MessagePack can represent
_encoder = msgspec.msgpack.Encoder(enc_hook=hook)


# The id of a request


class Heads:
    """Reads the id of a request whose body may be invalid. `requests`: the union type of all requests."""

    def __init__(self, requests: Any) -> None:
        kinds = [kind for kind in get_args(requests) if kind.__struct_fields__[:1] != ("id",)]
        self._without = {str(kind.__struct_config__.tag).encode() for kind in kinds}

    def number(self, body: bytes) -> int | None:
        """The id of the request in this body; None if the body does not begin like a request with an id."""
        try:
            tag, at = _text(body, _array(body))
            return None if tag in self._without else _integer(body, at)
        except (IndexError, struct.error):
            return None


class _NotThereError(IndexError):
    """The value at this place of the message is of another type."""


def _array(body: bytes) -> int:
    """The offset of the array's first element (https://github.com/msgpack/msgpack/blob/master/spec.md)."""
    code = body[0]
    if 0x92 <= code <= 0x9F:
        return 1
    if code in (0xDC, 0xDD):
        return 3 if code == 0xDC else 5
    raise _NotThereError


def _text(body: bytes, at: int) -> tuple[bytes, int]:
    """The text at this offset, and the offset of its end."""
    code = body[at]
    if 0xA0 <= code <= 0xBF:
        start, size = at + 1, code & 0x1F
    elif code == 0xD9:
        start, size = at + 2, body[at + 1]
    else:
        raise _NotThereError
    return body[start : start + size], start + size


_INTEGERS = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}


def _integer(body: bytes, at: int) -> int:
    code = body[at]
    if code <= 0x7F or code >= 0xE0:
        return code if code <= 0x7F else code - 0x100
    if code not in _INTEGERS:
        raise _NotThereError
    return int(struct.unpack_from(_INTEGERS[code], body, at + 1)[0])


# Answers


def refusal(error: Exception) -> DataplaneError:
    """The error for the sender of a message that could not be decoded: Misuse if its values are invalid, else
    ProtocolMismatch."""
    if isinstance(error, DataplaneError):
        return error
    return ProtocolMismatch(f"not a message: {clipped(str(error), _FIELD)}")


def failure(number: int, error: Exception, sender: object) -> Failure:
    """The answer to a request that failed with this error. An unexpected error is logged: one line, which names the
    sender."""
    if isinstance(error, OverflowError):  # a number in the message is too large for its destination
        error = Misuse(f"a number of the request, or what it adds up to, is out of range: {error}")
    if isinstance(error, RecursionError):
        error = Misuse("values of the request, or of what it asks for, are nested too deep")
    if isinstance(error, DataplaneError):
        name, text, fields = describe(error)
        return Failure(number, name, clipped(text), _plain(fields))
    _complaints.log(logging.ERROR, str(sender), "a request of %s failed: %s", sender, error_line(error))
    log.debug("traceback of the error above", exc_info=error)
    return Failure(number, "Rejected", "the node failed on this request; its log says how", {})


def _plain(value: Any, depth: int = _DEPTH) -> Any:
    """The value, reduced to what a message can contain."""
    match value:
        case None | bool() | float():
            return value
        case int():
            return min(max(value, _LEAST), _MOST)
        case str():
            return clipped(value, _FIELD)
        case Mapping() if depth:
            some = list(value.items())[:_ENTRIES]
            return {clipped(str(key), _FIELD): _plain(each, depth - 1) for key, each in some}
        case list() | tuple() if depth:
            return [_plain(each, depth - 1) for each in value[:_ENTRIES]]
    return clipped(str(value), _FIELD)


# Encoding


def encoded(message: Message, what: str = "message", room: int = 0) -> bytearray:
    """The bytes of the message, after `room` bytes for a head. Raises LimitExceeded if it is larger than a reader
    accepts, Misuse if it contains a value that no message can contain, such as a number beyond 64 bits, and
    RecursionError."""
    buffer = bytearray(room)
    try:
        _encoder.encode_into(message, buffer, room)
    except (OverflowError, ValueError, TypeError, msgspec.MsgspecError) as error:
        raise Misuse(f"a {type(message).__name__} with an invalid field: {error}") from None
    size = len(buffer) - room
    if size > MAX_FRAME:
        raise LimitExceeded(
            f"a {what} of {size} bytes is longer than the {MAX_FRAME} that are read; ask for fewer rows at once",
            what=what,
            asked=size,
            limit=MAX_FRAME,
        )
    return buffer


def answered(reply: Message, sender: object, what: str = "message") -> bytes:
    """The bytes of a reply or, if it cannot be encoded, of a `Failure` with that error."""
    try:
        return bytes(encoded(reply, what))
    except Exception as error:
        return bytes(encoded(failure(getattr(reply, "id", 0), error, sender)))
