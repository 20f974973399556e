"""Answers of a partition of a stream. `requests` exports these names too."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from dataplane.batch.ref import BatchRef
from dataplane.errors import DataplaneError, describe, revive
from dataplane.stream.packing import decoder, hook, union
from dataplane.stream.page import Index
from dataplane.stream.pieces import Listed
from dataplane.stream.snapshot_format import Head, Value


class StreamResult(msgspec.Struct, frozen=True, array_like=True):
    """Base class of answers."""


class Succeeded(StreamResult, frozen=True, tag=1):
    """Success."""


class CommandRefused(StreamResult, frozen=True, tag=2):
    """The error of a committed command that failed and changed nothing."""

    kind: str
    message: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: DataplaneError) -> CommandRefused:
        return cls(*describe(error))

    @property
    def error(self) -> DataplaneError:
        return revive(self.kind, self.message, self.fields)


class AppendResult(StreamResult, frozen=True, tag=3):
    """The offset of the first row. `new`: False if the same rows were appended before, and the columns are not
    needed."""

    first: int
    rows: int
    new: bool


class AdmitResult(StreamResult, frozen=True, tag=4):
    """The permit."""

    ticket: int


class Delivered(StreamResult, frozen=True, tag=6):
    """Rows leased to the client under a grant. `rows`: their offsets. `holds`: the delivery number for `Extend`. `keys`
    is empty if no row of the stream has one. `replica`: the receiving one."""

    grant: int
    rows: Index
    ref: BatchRef
    holds: int
    keys: list[str]
    groups: list[str | int | None]
    versions: list[int]
    tags: dict[str, list[Value]]
    lengths: dict[str, Index]
    replica: int | None = None


class LostRowsResult(StreamResult, frozen=True, tag=7):
    """Rows that were lost with the nodes that stored their columns: the offset of each, and its `LossRecord`."""

    rows: list[tuple[int, str, str | int | None, int, int]]


class CandidateRows(StreamResult, frozen=True, tag=11):
    """The candidates of a sampler (`sampler.Candidates`); `age_s` is float64 as bytes. `changes`: the `seen` of the
    next `Look`. `left`: the number of rows that the task has not done."""

    changes: int
    rows: Index
    group: Index
    version: Index
    age_s: bytes
    group_rows: Index
    group_dropped: Index
    lengths: dict[str, Index]
    tags: dict[str, list[Value]]
    latest: int
    closed: bool
    whole: bool
    left: int


class FoundRows(StreamResult, frozen=True, tag=12):
    """The row of each key; -1 for a key without a row."""

    rows: Index


class RetryResult(StreamResult, frozen=True, tag=8):
    """The number of rows that are pending again."""

    rows: int


class HeldRows(StreamResult, frozen=True, tag=18):
    """References to the columns on the node that rows need. `next`: the number of the last column batch in `refs`, or
    -1 if the list is complete. `pieces`: its returned references. A request with both gets the following ones. `last`:
    the number of the last entry of the node's outbox."""

    refs: list[bytes]
    next: int
    last: int
    pieces: int = 0


MAX_HELD = 256 << 10
"""Approximate bytes of references in one `HeldRows`."""


def held_rows(needed: Iterable[tuple[int, Any]], after: int, pieces: int, last: int) -> HeldRows:
    """The answer with the references of these column batches. Their numbers are ascending, from `after` on. The first
    `pieces` references of the batch `after` are skipped."""
    refs: list[bytes] = []
    nbytes, at, given, skipped = 0, after, pieces, 0
    for number, batch in needed:
        if number == after and skipped < pieces:
            skipped += 1
            continue
        if nbytes > MAX_HELD:
            return HeldRows(refs, at, last, given)
        refs.append(batch.ref.encode())
        given = given + 1 if number == at else 1
        nbytes, at = nbytes + len(refs[-1]), number
    return HeldRows(refs, -1, last)


class UnfinishedRows(StreamResult, frozen=True, tag=19):
    """Rows in progress."""

    rows: list[Listed]


class PartitionFigures(StreamResult, frozen=True, tag=13):
    """See `statistics.figures`."""

    values: dict[str, Any]


class SnapshotTaken(StreamResult, frozen=True, tag=14):
    """`snapshot`: its number at this leader. `head`: the state of the stream as a whole. `pages`: the pages that have
    rows; a page is `PAGE` consecutive row numbers."""

    snapshot: int
    head: Head
    pages: list[int]


class SnapshotRows(StreamResult, frozen=True, tag=15):
    """Rows of a snapshot: `block` is an encoded `RowsState`. `columns`: rows, the task for which their producer held
    them (-1: none), and a reference."""

    block: bytes
    columns: list[tuple[Index, int, BatchRef]]


class Letters(StreamResult, frozen=True, tag=16):
    """Dead letters; fields as in `Delivered`. `ref` is None if the rows have no column in common. `reasons`: for each
    row, why it was given back last; "" if unknown."""

    rows: Index
    ref: BatchRef | None
    keys: list[str]
    groups: list[str | int | None]
    versions: list[int]
    tags: dict[str, list[Value]]
    reasons: list[str]


ToClient = (
    Succeeded
    | Delivered
    | CandidateRows
    | Letters
    | RetryResult
    | PartitionFigures
    | UnfinishedRows
    | SnapshotTaken
    | SnapshotRows
)
"""The answers to `requests.FromClient`."""

encode_result: Callable[[StreamResult], bytes] = msgspec.msgpack.Encoder(enc_hook=hook).encode
decode_result: Callable[[bytes], StreamResult] = decoder(
    union(globals(), StreamResult), "answer of a stream's partition"
)
"""The decoded answer. Raises ProtocolMismatch."""


class _Given(msgspec.Struct, frozen=True, array_like=True):
    """The beginning of an answer that has a grant, permit or snapshot: the tag of its class, and the number."""

    kind: int
    number: int


_given = msgspec.msgpack.Decoder(_Given)
_GIVING = {kind.__struct_config__.tag: kind for kind in (AdmitResult, Delivered, SnapshotTaken)}


def given(result: bytes) -> tuple[type[StreamResult] | None, int]:
    """The class of an encoded answer with a permit, grant or snapshot, and the number of that. The class is None for
    other answers."""
    try:
        found = _given.decode(result)
    except msgspec.MsgspecError:
        return None, 0
    return _GIVING.get(found.kind), found.number
