"""Requests to a partition of a table, and its answers.

The command of a request that changes the table is the request itself: the log contains it unchanged. Such a request of
a client has the name of the client and a sequence number (from 1), and is executed once: if it is sent again, it gets
the first answer. Requests without a sequence number are made by the driver, and may be executed twice. The leader
answers reads without a command. A request names rows by key or, if it has no keys, by number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from dataplane.errors import Corrupt
from dataplane.stream import requests as s
from dataplane.stream.packing import PackedIntegers, decoder, hook
from dataplane.stream.page import NONE, Index
from dataplane.stream.requests import CommandRefused, HeldRows, ListHeldColumns, StreamRequest, StreamResult, Succeeded

# Commands of clients


class Upsert(StreamRequest, frozen=True, tag=1, kw_only=True):
    """Write rows; rows with new keys are added. `ref`: an encoded reference to the columns to write, empty for none.
    `tags`: a dict for each row, or no dicts. Answered by `RowNumbers` or, with `look`, by `Looked` for all columns."""

    keys: list[str] = []
    rows: Index = NONE
    ref: bytes = b""
    tags: list[dict[str, Any]] = []
    look: bool = False


class ClearRows(StreamRequest, frozen=True, tag=2, kw_only=True):
    """Remove rows."""

    keys: list[str] = []
    rows: Index = NONE


class Claim(StreamRequest, frozen=True, tag=3, kw_only=True):
    """Mark rows as claimed by the task, either all or none of them, and remember the rows `give` under the id. Answered
    by `ClaimedRows`."""

    task: str
    rows: Index
    give: Index
    claim_id: str = ""


class Release(StreamRequest, frozen=True, tag=4, kw_only=True):
    """Undo the claims of the task (empty: of all tasks) on these rows, or on all."""

    task: str
    rows: Index = NONE
    all: bool = False


class DropTable(StreamRequest, frozen=True, tag=5, kw_only=True):
    """Drop the table. If it is written again later, the numbers of rows continue."""


CHANGES = (Upsert, ClearRows, Claim, Release, DropTable)
"""The requests of clients that change the table."""


# Commands of the driver, besides those that a stream has too: `Lose`, `Return`, `OutboxReceived`, `EndClients` (and
# `EndClient`, which sessions send)


class OpenTable(StreamRequest, frozen=True, tag=6, kw_only=True):
    """The first request to a partition: the numbers of the next row and of the last change."""

    first: int
    changes: int


class Retire(StreamRequest, frozen=True, tag=7, kw_only=True):
    """End the partition, if it has no table and an empty outbox. Answered by `Retired`."""


# Reads


class Number(StreamRequest, frozen=True, tag=60, kw_only=True):
    """Ask for the numbers of rows. Answered by `RowNumbers`."""

    keys: list[str]


class Read(StreamRequest, frozen=True, tag=61, kw_only=True):
    """Ask for a reference to these columns of rows, or with None to all columns that each of the rows has. Answered by
    `Referred`."""

    keys: list[str] = []
    rows: Index = NONE
    columns: list[str] | None = None


class DescribeColumns(StreamRequest, frozen=True, tag=62, kw_only=True):
    """Ask for the columns of the table. Answered by `Referred`, with a reference that has no rows, or without a
    reference if there is no column."""


class LookRows(StreamRequest, frozen=True, tag=63, kw_only=True):
    """Ask for the metadata of rows or, with `all`, of the next rows after the number `after`. `missing_ok`: unknown
    keys are left out. Answered by `Looked`, which has no rows if the table has not changed since `since`."""

    keys: list[str] = []
    rows: Index = NONE
    all: bool = False
    after: int = -1
    columns: list[str] = []
    tags: bool = True
    since: int = 0
    missing_ok: bool = False


class FindReady(StreamRequest, frozen=True, tag=64, kw_only=True):
    """Ask for the rows after the number `after` that have all these columns and that the task, if given, has not
    claimed; or, without `after`, for all rows of the claim with the id `claim_id` if there is one. Answered by
    `RowNumbers`, or by nothing if there are fewer rows than `least`."""

    columns: list[str]
    task: str = ""
    claim_id: str = ""
    least: int = 1
    after: int = -1


class FindClaim(StreamRequest, frozen=True, tag=65, kw_only=True):
    """Ask for the rows of a claim id. Answered by `ClaimedRows`."""

    task: str
    claim_id: str


class Claimed(StreamRequest, frozen=True, tag=66, kw_only=True):
    """Ask whether the task has claimed each of these rows or, with `all`, of the next rows after the number `after`.
    Answered by `Flagged`."""

    task: str
    rows: Index = NONE
    all: bool = False
    after: int = -1


Command = (
    Upsert
    | ClearRows
    | Claim
    | Release
    | DropTable
    | OpenTable
    | s.Lose
    | s.Return
    | s.OutboxReceived
    | s.EndClient
    | s.EndClients
    | Retire
)
Question = Number | Read | DescribeColumns | LookRows | FindReady | FindClaim | Claimed
AnyRequest = Command | Question | ListHeldColumns


class RowNumbers(StreamResult, frozen=True, tag=3):
    """Numbers of rows. `more`: whether there are further rows after the last one."""

    rows: Index
    more: bool = False


class Referred(StreamResult, frozen=True, tag=4):
    """An encoded reference; empty for none."""

    ref: bytes


class Looked(StreamResult, frozen=True, tag=5):
    """The metadata of rows. `have`: for each row a bit for each requested column, 1 if the row has it. `changes`: the
    value for `since` in the next request. `more`: as in `RowNumbers`. `columns`: all columns of the table, if none were
    requested."""

    changes: int
    rows: Index = NONE
    keys: list[str] = []
    tags: list[dict[str, Any]] = []
    have: bytes = b""
    more: bool = False
    columns: list[str] = []


class ClaimedRows(StreamResult, frozen=True, tag=6):
    """The rows of a claim. `granted` is False if some rows were claimed before, or if no claim has the id."""

    granted: bool
    rows: Index = NONE


class Flagged(StreamResult, frozen=True, tag=7):
    """A byte for each row, 1 if it was claimed; the number of the last row; and `more` as in `RowNumbers`."""

    flags: bytes = b""
    last: int = -1
    more: bool = False


class Retired(StreamResult, frozen=True, tag=8):
    """Whether the partition has ended, and the number of its next row."""

    gone: bool
    next: int


class Wrote(StreamResult, frozen=True, tag=9):
    """The remembered part of the answer to a write: the numbers of its rows."""

    rows: PackedIntegers


class Gave(StreamResult, frozen=True, tag=10):
    """The remembered part of a `ClaimedRows`."""

    granted: bool
    rows: PackedIntegers


AnyResult = (
    Succeeded
    | CommandRefused
    | HeldRows
    | RowNumbers
    | Referred
    | Looked
    | ClaimedRows
    | Flagged
    | Retired
    | Wrote
    | Gave
)

FromClient = Upsert | ClearRows | Claim | Release | DropTable | Question
"""The requests that clients make themselves, inside an `AskTable`."""

ToClient = Succeeded | RowNumbers | Referred | Looked | ClaimedRows | Flagged
"""The answers to `FromClient`."""

encode_request: Callable[[StreamRequest], bytes] = msgspec.msgpack.Encoder(enc_hook=hook).encode
encode_result: Callable[[StreamResult], bytes] = msgspec.msgpack.Encoder(enc_hook=hook).encode
decode_request: Callable[[bytes], AnyRequest] = decoder(AnyRequest, "request to a table's partition")
"""The decoded request. Raises ProtocolMismatch."""

decode_command: Callable[[bytes], Command] = decoder(Command, "command of a table", Corrupt)
"""The decoded command. Raises Corrupt."""

decode_result: Callable[[bytes], AnyResult] = decoder(AnyResult, "answer of a table's partition")
"""The decoded answer. Raises ProtocolMismatch."""
