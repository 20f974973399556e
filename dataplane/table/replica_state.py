"""The encoded replicated state of a partition of a table: everything that commands depend on.

Equal states have equal bytes, independent of a replica's history. Counts that can be computed from the rest are not
encoded. The bytes begin with a version and a checksum.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import msgspec

from dataplane.batch.field import Field
from dataplane.errors import Corrupt
from dataplane.replication.outbox import OutboxState
from dataplane.stream.packing import PackedIntegers
from dataplane.stream.snapshot_format import checked_body, refused, with_checksum

_MAGIC = b"dptables\x01"  # the last byte is the version


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
    return with_checksum(_MAGIC, _encode(state))


def open_sealed(data: bytes, name: str) -> SavedTableState:
    """The decoded state. Raises Corrupt if the bytes are invalid, or of another table or version."""
    body = checked_body(_MAGIC, data, "a table's partition")
    with believing_nothing(name):
        state = _decode(body)
    if state.name != name:
        raise Corrupt(f"a snapshot of the table {state.name!r}, and this is {name!r}")
    return state


def believing_nothing(name: str) -> AbstractContextManager[None]:
    """A context that raises Corrupt in place of the errors that an invalid state causes."""
    return refused(f"a snapshot of the table {name!r} that no replica made")
