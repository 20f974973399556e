"""What a stream's partition answers: see `requests`, which has these names too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from dataplane.batch.ref import BatchRef
from dataplane.errors import Corrupt, DataplaneError, ProtocolMismatch, describe, revive
from dataplane.stream.block import Block, Head, Value
from dataplane.stream.packing import hook, unhook
from dataplane.stream.page import Index
from dataplane.stream.pieces import Listed


class Result(msgspec.Struct, frozen=True, array_like=True):
    """The root of answers."""


class Done(Result, frozen=True, tag=1):
    """It is done."""


class Refused(Result, frozen=True, tag=2):
    """A committed command that could not be done, and changed nothing: the error that it is for who asked."""

    kind: str
    message: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, error: DataplaneError) -> Refused:
        return cls(*describe(error))

    @property
    def error(self) -> DataplaneError:
        return revive(self.kind, self.message, self.fields)


class Appended(Result, frozen=True, tag=3):
    """The offset of the first row. Not `new`: the very same rows came before, and these columns are not needed."""

    first: int
    rows: int
    new: bool


class Admitted(Result, frozen=True, tag=4):
    """Leave to append."""

    ticket: int


class Delivered(Result, frozen=True, tag=6):
    """Rows that the client holds now, under a grant. `rows`: their offsets. `keys` is empty where no row has one.
    `replica`: of a member, the one that they are given to."""

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


class GrantGiven(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """As much of a `Delivered` as it takes to give it back."""

    grant: int


class TicketGiven(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """As much of an `Admitted` as that."""

    ticket: int


class LostRows(Result, frozen=True, tag=7):
    """Rows that are gone with what stored their columns: the offset of each, and a `LostRow`."""

    rows: list[tuple[int, str, str | int | None, int, int]]


class Shown(Result, frozen=True, tag=11):
    """See `sampler.Candidates`; `age_s` is float64 as bytes. `changes` is for the next `Look`, `left` how many rows the
    task is not done with."""

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


class Found(Result, frozen=True, tag=12):
    """The rows, -1 for a key that no row has."""

    rows: Index


class Held(Result, frozen=True, tag=18):
    """References that rows came with and need, of which the node has something. `next`: to go on after; -1 where that
    is all. `last`: the number of the last entry that there is for the node."""

    refs: list[bytes]
    next: int
    last: int


class UnfinishedRows(Result, frozen=True, tag=19):
    """Rows in progress."""

    rows: list[Listed]


class Figures(Result, frozen=True, tag=13):
    """As `figures.figures` has them."""

    values: dict[str, Any]


class SnapshotTaken(Result, frozen=True, tag=14):
    """The snapshot's number at this leader, and what is known of the rows as a whole."""

    snapshot: int
    head: Head


class SnapshotRows(Result, frozen=True, tag=15):
    """Rows of a snapshot, and their columns: which rows, for which task they were held by who brought them (-1: none),
    and a reference."""

    block: Block
    columns: list[tuple[Index, int, BatchRef]]


class Letters(Result, frozen=True, tag=16):
    """Dead letters: fields as in `Delivered`. No reference where the rows have no column in common."""

    rows: Index
    ref: BatchRef | None
    keys: list[str]
    groups: list[str | int | None]
    versions: list[int]
    tags: dict[str, list[Value]]


AnyResult = (
    Done
    | Refused
    | Appended
    | Admitted
    | Delivered
    | LostRows
    | Shown
    | Found
    | Held
    | Figures
    | SnapshotTaken
    | SnapshotRows
    | Letters
    | UnfinishedRows
)

ToClient = Done | Delivered | Shown | Letters | Figures | UnfinishedRows | SnapshotTaken | SnapshotRows
"""The answers to `requests.FromClient`."""

encode_result: Callable[[Result], bytes] = msgspec.msgpack.Encoder(enc_hook=hook).encode
_results = msgspec.msgpack.Decoder(AnyResult, dec_hook=unhook)
_given = msgspec.msgpack.Decoder(GrantGiven | TicketGiven)


def decode_result(result: bytes) -> AnyResult:
    """Raises ProtocolMismatch for what is no answer."""
    try:
        found: AnyResult = _results.decode(result)
        return found
    except (msgspec.MsgspecError, ValueError, TypeError, Corrupt) as error:
        raise ProtocolMismatch(f"this is no answer of a stream's partition: {error}") from error


def given(result: bytes) -> GrantGiven | TicketGiven | None:
    """What an answer gives that can be given back; None for nothing."""
    try:
        found: GrantGiven | TicketGiven = _given.decode(result)
        return found
    except msgspec.MsgspecError:
        return None
