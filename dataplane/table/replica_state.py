"""The encoded replicated state of a partition of a table: everything that commands depend on.

Equal states have equal bytes, independent of a replica's history. Counts that follow from the rest are not encoded, but
computed again. The bytes begin with a version and a checksum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import xxhash

from dataplane.batch.field import Field
from dataplane.errors import Corrupt, DataplaneError
from dataplane.replication.outbox import OutboxState
from dataplane.stream.packing import PackedIntegers

_MAGIC = b"dptables\x01"  # the last byte is the version
_SUM = 8


class ColumnState(msgspec.Struct, array_like=True):
    """One column: for each row, the write that has its value (-1: none) and the number of the row in that write."""

    name: str
    field: Field
    written: PackedIntegers
    row: PackedIntegers


class WrittenState(msgspec.Struct, array_like=True):
    """One write, and the number of its cells that are still needed."""

    number: int
    ref: bytes
    left: int
    exact: bool


class TaskState(msgspec.Struct, array_like=True):
    """The positions of the rows that a task has claimed, and the rows of each claim id."""

    name: str
    claimed: PackedIntegers
    claim_ids: list[tuple[str, PackedIntegers]]


class TableState(msgspec.Struct, array_like=True):
    """The existing rows in ascending order, and the metadata of each."""

    next: int
    next_written: int
    changes: int
    numbers: PackedIntegers
    keys: list[str]
    tags: list[dict[str, Any] | None]
    tag_bytes: PackedIntegers
    columns: list[ColumnState]
    written: list[WrittenState]
    tasks: list[TaskState]


class SavedTableState(msgspec.Struct, array_like=True):
    """The whole state of a partition."""

    name: str
    there: bool
    retired: bool
    changes: int
    table: TableState
    lost_nodes: list[tuple[bytes, int]]
    outboxes: list[OutboxState]
    sessions: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SavedTableState).decode


def seal(state: SavedTableState) -> bytes:
    """The encoded state, with version and checksum."""
    body = _encode(state)
    return _MAGIC + xxhash.xxh3_64_digest(body) + body


def open_sealed(data: bytes, name: str) -> SavedTableState:
    """The decoded state. Raises Corrupt if the bytes are invalid, or of another table or version."""
    start = len(_MAGIC) + _SUM
    if not data.startswith(_MAGIC[:-1]):
        raise Corrupt("this is no snapshot of a table's partition")
    if not data.startswith(_MAGIC):
        raise Corrupt(f"a snapshot of version {data[len(_MAGIC) - 1]}; this reads version {_MAGIC[-1]}")
    if xxhash.xxh3_64_digest(data[start:]) != data[len(_MAGIC) : start]:
        raise Corrupt("a snapshot of a table's partition with another checksum than its bytes have")
    with believing_nothing(name):
        state = _decode(data[start:])
    if state.name != name:
        raise Corrupt(f"a snapshot of the table {state.name!r}, and this is {name!r}")
    return state


@contextmanager
def believing_nothing(name: str) -> Iterator[None]:
    """A context that raises Corrupt in place of the errors that an invalid state causes."""
    try:
        yield
    except (ValueError, LookupError, OverflowError, msgspec.MsgspecError, DataplaneError) as error:
        raise Corrupt(f"a snapshot of the table {name!r} that no replica made: {error}") from error
