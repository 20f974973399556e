"""The format of snapshots of a stream: the parts of a checkpoint, and the whole replicated state as bytes.

A checkpoint is a `Head` and blocks of rows (`RowsState`), with separate references to their columns. The state of a
replica (`SavedStreamState`) has the same parts, but a `ColumnsState` in place of the references, which preserves the
numbers of column batches. Functions that make and restore these are in `snapshot`.

Invariant: equal values have equal bytes. The bytes of a replica's state begin with a version and a checksum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import msgspec
import xxhash

from dataplane.batch.field import Field
from dataplane.errors import Corrupt, DataplaneError
from dataplane.replication.outbox import OutboxState
from dataplane.stream.packing import PackedIntegers
from dataplane.stream.pieces import Begun
from dataplane.stream.settings import StreamSettings

Value = str | int | float | bool | None
S = TypeVar("S", bound=Any)

_MAGIC = b"dpstream\x06"  # the last byte is the version
_SUM = 8


class Head(msgspec.Struct, frozen=True, array_like=True):
    """The stream as a whole. `next`: the number of its next row. `counts`: for each task the number of acks, expired
    rows and dead letters so far."""

    settings: StreamSettings
    mark: str
    next: int
    appended: int
    latest: int
    closed: bool
    counts: list[list[int]]


class RowsState(msgspec.Struct, array_like=True):
    """Existing rows in ascending order, and the metadata of each. `group`: the position of its group in `groups`, -1
    for none. `drops`: for positions in `groups`, the dropped rows that count for each task. `arrived`: seconds; in a
    checkpoint relative to its time. `states` and `tries` are [tasks, rows]. `keyed`: the positions of the rows that
    have `keys` of users. `calls`: see `Keys.state`. `begun`: the rows in progress. `reasons`: for each dead letter with
    a reason, the task, the position of the row, and why its last delivery was given back."""

    offsets: PackedIntegers
    group: PackedIntegers
    groups: list[str | int]
    drops: list[tuple[int, list[int]]]
    versions: PackedIntegers
    arrived: PackedIntegers
    tags: dict[str, list[Value]]
    lengths: dict[str, PackedIntegers]
    states: PackedIntegers
    tries: PackedIntegers
    dropped: PackedIntegers
    keyed: PackedIntegers
    keys: list[str]
    calls: list[tuple[str, int, int, bytes]]
    begun: list[Begun]
    reasons: list[tuple[int, int, str]] = []


class BatchState(msgspec.Struct, array_like=True, gc=False):
    """A `column_batch.ColumnBatch` in a snapshot."""

    number: int
    ref: bytes
    hold: PackedIntegers
    nodes: tuple[bytes, ...]
    pieces: list[tuple[bytes, tuple[bytes, ...]]] = []
    """For a row in pieces: the reference of each piece, and the nodes with copies of it."""


class LayerState(msgspec.Struct, array_like=True):
    """A layer (`page`): the columns with these names, for each row."""

    names: tuple[str, ...]
    batch: PackedIntegers
    index: PackedIntegers


class ColumnsState(msgspec.Struct, array_like=True):
    """The columns of the rows. `schema`: in the order of their bits. `next`: the number of the next column
    batch. `kept`: the numbers of replaced column batches that may still be read."""

    schema: list[tuple[str, Field]]
    next: int
    batches: list[BatchState]
    layers: list[LayerState]
    kept: list[PackedIntegers]


class SavedStreamState(msgspec.Struct, array_like=True):
    """The replicated state of a partition: everything that commands depend on, which excludes leases."""

    name: str
    head: Head
    rows: RowsState
    columns: ColumnsState
    tag_names: list[str]
    clock_s: float
    lost: list[tuple[int, str, str | int | None, int, int]]
    lost_nodes: list[tuple[bytes, int]]
    opened: bool
    outboxes: list[OutboxState]
    sessions: bytes
    ended: list[int]


encode_rows = msgspec.msgpack.Encoder(order="sorted").encode
decode_rows = msgspec.msgpack.Decoder(RowsState).decode


@contextmanager
def refused(what: str) -> Iterator[None]:
    """A context that raises Corrupt, with this text, in place of the errors that invalid values cause."""
    try:
        yield
    except (ValueError, LookupError, OverflowError, msgspec.MsgspecError, DataplaneError) as error:
        raise Corrupt(f"{what}: {error}") from error


def seal(state: Any, magic: bytes = _MAGIC, order: Literal["sorted"] | None = "sorted") -> bytes:
    """The bytes of a state: the magic bytes, a checksum, and the encoded state. The last magic byte is the version of
    the format. `order`: "sorted" to sort the entries of dicts."""
    body = msgspec.msgpack.encode(state, order=order)
    return magic + xxhash.xxh3_64_digest(body) + body


def open_sealed(data: bytes, name: str, kind: type[S], what: str = "stream", magic: bytes = _MAGIC) -> S:
    """The state of the stream or table (`what`) of this name. Raises Corrupt for invalid bytes, another version or
    another name."""
    start = len(magic) + _SUM
    if not data.startswith(magic[:-1]):
        raise Corrupt(f"this is no snapshot of a {what}'s partition")
    if not data.startswith(magic):
        raise Corrupt(f"a snapshot of version {data[len(magic) - 1 : len(magic)].hex()}; this reads {magic[-1:].hex()}")
    if xxhash.xxh3_64_digest(data[start:]) != data[len(magic) : start]:
        raise Corrupt(f"a snapshot of a {what}'s partition whose bytes are not those that were written")
    with refused(f"this is no snapshot of a {what}'s partition"):
        state: S = msgspec.msgpack.decode(data[start:], type=kind)
    if state.name != name:
        raise Corrupt(f"a snapshot of the {what} {state.name!r}, and this is {name!r}")
    return state
