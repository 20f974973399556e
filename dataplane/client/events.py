"""The events of requests, and trace events that connect the append, the delivery and the ack of a row.

Producer and consumer compute the same 64-bit number for a row. For a generated key, it is computed from the stream's
key prefix and the row's number, else from the key. If many rows are not consecutive, events are recorded for some of
them only.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import xxhash

from dataplane.client.ownership import asked_in
from dataplane.config import environment
from dataplane.observe import _writer
from dataplane.observe.ring import CODE, RING_BYTES, RingWriter
from dataplane.stream import requests as r
from dataplane.table import requests as t
from dataplane.wire import row_messages as rm
from dataplane.wire import shard_messages as sm

if TYPE_CHECKING:
    from dataplane.client.connection import Connection

log = logging.getLogger(__name__)

_OPERATIONS: dict[str, tuple[type[Any], ...]] = {
    "put": (sm.PutShard,),
    "reserve": (sm.Reserve,),
    "seal": (sm.SealShards,),
    "get": (sm.PinShards,),
    "free": (sm.Free,),
    "wait": (rm.AdmitRows,),
    "append": (rm.AppendRows,),
    "extend": (rm.ExtendRows,),
    "consume": (r.Consume,),
    "ack": (r.Ack, r.Nack),
    "table write": (t.Upsert,),
    "table read": (t.Read, t.LookRows),
    "table claim": (t.Claim,),
}
_CODES = {kind: CODE[name] for name, kinds in _OPERATIONS.items() for kind in kinds}

_SOME = 32  # the most rows of one call that are recorded one by one
_APPEND, _CONSUME = CODE["flow append"], CODE["flow consume"]
_GRANT, _ACK = CODE["flow grant"], CODE["flow ack"]


def code(request: Any) -> int:
    """The event code of a request."""
    if isinstance(request, rm.AppendRows) and request.columns is None:
        return CODE["request"]  # `stream_writes` records the whole append, including its admission
    return _CODES.get(type(asked_in(request)), CODE["request"])


def appended(connection: Connection, mark: str, reply: rm.RowsAppended, keys: Sequence[str], rows: int) -> None:
    """Record that the last event was an append of these rows. `keys`: the keys from the caller; empty if generated."""
    events = connection.events
    if events is None:
        return
    if keys:
        for key in keys[:_SOME]:
            events.flow(_APPEND, _of_key(key))
    else:
        events.flow(_APPEND, _of(mark, reply.first), rows)


def delivered(connection: Connection, mark: str, stream: bytes, given: r.Delivered) -> None:
    """Record that the last event was a consume of these rows."""
    events, numbers = connection.events, given.rows
    if events is None:
        return
    events.flow(_GRANT, _grant(stream, given.grant))
    if given.keys:
        for key in given.keys[:: -(-len(given.keys) // _SOME)]:
            events.flow(_CONSUME, _of_key(key))
    elif len(numbers):
        first, count = int(numbers[0]), len(numbers)
        if int(numbers[-1]) - first == count - 1:
            events.flow(_CONSUME, _of(mark, first), count)
        else:
            for number in numbers[:: -(-count // _SOME)]:
                events.flow(_CONSUME, _of(mark, int(number)))


def settled(connection: Connection, stream: bytes, grant: int) -> None:
    """Record that the last event was an ack of a delivery."""
    if connection.events is not None:
        connection.events.flow(_ACK, _grant(stream, grant))


def _grant(stream: bytes, grant: int) -> int:
    return zlib.crc32(stream) << 32 | grant & 0xFFFFFFFF


def _of(mark: str, number: int) -> int:
    return zlib.crc32(mark.encode()) << 32 | number & 0xFFFFFFFF


def _of_key(key: str) -> int:
    """The number of a row by its key, of a user or generated (`stream.keys.unnamed`)."""
    if key.startswith("~"):
        mark, _, number = key[1:].rpartition(".")
        if number.isdecimal():
            return _of(mark, int(number))
    return xxhash.xxh3_64_intdigest(key.encode())


def ring_writer(size: int, fd: int) -> _writer.Writer | None:
    """The writer of events to the ring of the node's `Welcome`. None if the ring has the format of another version or
    cannot be mapped, or if `observe` is off."""
    try:
        if size == RING_BYTES and os.fstat(fd).st_size >= RING_BYTES and environment().observe:
            return RingWriter(fd).writer
    except OSError as error:  # no memory to map it: continue without
        log.warning("this process records no events: %s", error)
    finally:
        os.close(fd)
    return None
