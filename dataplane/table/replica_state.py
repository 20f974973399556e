"""The encoded replicated state of a partition of a table: everything that commands depend on.

Equal states have equal bytes, independent of a replica's history. Counts that can be computed from the rest are not
encoded. The bytes begin with a version and a checksum.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dataplane.batch.field import Field
from dataplane.replication.outbox import OutboxState
from dataplane.stream.packing import PackedIntegers

MAGIC = b"dptables\x01"  # the last byte is the version


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
