"""What a table's partition is asked, and what it answers.

Those that change it are its commands too: the log has the request as it came. One of a client names the client and a
sequence, from 1, and is done once: sent again, it is answered as it was the first time. Those without are the driver's
own, and may be repeated. The rest is read at the leader, without a command. Rows are named by their keys or, where
there are none, by number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from dataplane.errors import Corrupt, ProtocolMismatch
from dataplane.replication.lost_nodes import ALL
from dataplane.stream.packing import Packed, hook, unhook
from dataplane.stream.requests import Done, Held, Holding, Refused, Request, Result
from dataplane.table.written import Index

_NONE: Index = np.empty(0, np.int64)


# Commands of clients


class Write(Request, frozen=True, tag=1, kw_only=True):
    """Rows, made where a key has none: the columns of `ref` (encoded; none where it is empty) in place of those that
    they had, and one dict of tags a row, or none. Answered by `Numbered`; with `look` by `Looked`, of all columns."""

    keys: list[str] = []
    rows: Index = _NONE
    ref: bytes = b""
    tags: list[dict[str, Any]] = []
    look: bool = False


class Clear(Request, frozen=True, tag=2, kw_only=True):
    """These rows go."""

    keys: list[str] = []
    rows: Index = _NONE


class Take(Request, frozen=True, tag=3, kw_only=True):
    """Mark rows as taken by the task, all or none, and remember `give` under the claim. Answered by `Given`."""

    task: str
    rows: Index
    give: Index
    claim: str = ""


class Untake(Request, frozen=True, tag=4, kw_only=True):
    """These rows, or all, as if the task, or with an empty one any task, had not taken them."""

    task: str
    rows: Index = _NONE
    all: bool = False


class Drop(Request, frozen=True, tag=5, kw_only=True):
    """The table goes. Its numbers go on if it is written to again."""


# Commands of the driver


class Open(Request, frozen=True, tag=6, kw_only=True):
    """The first: the number of the next row, and the number that the last change had."""

    first: int
    changes: int


class Lose(Request, frozen=True, tag=7, kw_only=True):
    """What the node stored is gone, shards with lower numbers than `before`."""

    node: bytes
    before: int = ALL


class Return(Request, frozen=True, tag=11, kw_only=True):
    """The node is there again, with the shards that it stores from this one on."""

    node: bytes
    first: int


class Told(Request, frozen=True, tag=8, kw_only=True):
    """The node was told the entries of its outbox up to this number."""

    node: bytes
    last: int


class End(Request, frozen=True, tag=9, kw_only=True):
    """No sequence comes again of these clients, or of those whose names begin with `node`."""

    clients: list[str] = []
    node: str = ""


class Retire(Request, frozen=True, tag=10, kw_only=True):
    """Be no partition any more, if there is no table and nobody has to be told anything. Answered by `Retired`."""


# Reads


class Number(Request, frozen=True, tag=20, kw_only=True):
    """The numbers of the rows of these keys. Answered by `Numbered`."""

    keys: list[str]


class Read(Request, frozen=True, tag=21, kw_only=True):
    """These columns of rows; None: all that each of them has. Answered by `Referred`."""

    keys: list[str] = []
    rows: Index = _NONE
    columns: list[str] | None = None


class Describe(Request, frozen=True, tag=22, kw_only=True):
    """What the columns are. Answered by `Referred`, of no rows; without a reference where there is no column."""


class Look(Request, frozen=True, tag=23, kw_only=True):
    """What is known of rows, or with `all` of the next rows behind the number `after`; nothing, where nothing has
    changed since `since`. Answered by `Looked`."""

    keys: list[str] = []
    rows: Index = _NONE
    all: bool = False
    after: int = -1
    columns: list[str] = []
    tags: bool = True
    since: int = 0


class Ready(Request, frozen=True, tag=24, kw_only=True):
    """The rows behind the number `after` that have all these columns and that the task (empty: no matter which) has not
    taken; or those of the claim, if it was made. Answered by `Numbered`; by nothing where they are fewer than
    `least`."""

    columns: list[str]
    task: str = ""
    claim: str = ""
    least: int = 1
    after: int = -1


class Claimed(Request, frozen=True, tag=25, kw_only=True):
    """What was given under a claim. Answered by `Given`."""

    task: str
    claim: str


class Taken(Request, frozen=True, tag=26, kw_only=True):
    """Which of these rows, or with `all` of the next rows behind the number `after`, the task has taken. Answered by
    `Flagged`."""

    task: str
    rows: Index = _NONE
    all: bool = False
    after: int = -1


Command = Write | Clear | Take | Untake | Drop | Open | Lose | Return | Told | End | Retire
Question = Number | Read | Describe | Look | Ready | Claimed | Taken
AnyRequest = Command | Question | Holding


class Numbered(Result, frozen=True, tag=3):
    """Numbers of rows. `more`: there are more behind the last."""

    rows: Index
    more: bool = False


class Referred(Result, frozen=True, tag=4):
    """An encoded reference; empty where there is none."""

    ref: bytes


class Looked(Result, frozen=True, tag=5):
    """What is known of rows: `have` is, row by row, a bit for each column asked for. `changes` is for the next `since`.
    `more` as in `Numbered`. `columns`: those of the table, where nobody named any."""

    changes: int
    rows: Index = _NONE
    keys: list[str] = []
    tags: list[dict[str, Any]] = []
    have: bytes = b""
    more: bool = False
    columns: list[str] = []


class Given(Result, frozen=True, tag=6):
    """The rows that were given; not `granted`: some were taken already, or nobody has made the claim."""

    granted: bool
    rows: Index = _NONE


class Flagged(Result, frozen=True, tag=7):
    """Of each row whether it was taken, a byte each; and the number of the last, with `more` as in `Numbered`."""

    flags: bytes = b""
    last: int = -1
    more: bool = False


class Retired(Result, frozen=True, tag=8):
    """Whether there is no table any more, and the number of its next row."""

    gone: bool
    next: int


class Wrote(Result, frozen=True, tag=9):
    """What is remembered of the answer of a write: the numbers of its rows."""

    rows: Packed


class Gave(Result, frozen=True, tag=10):
    """What is remembered of a `Given`."""

    granted: bool
    rows: Packed


AnyResult = Done | Refused | Held | Numbered | Referred | Looked | Given | Flagged | Retired | Wrote | Gave

FromClient = Write | Clear | Take | Untake | Drop | Question
"""The requests that a client makes of a table as they are."""

ToClient = Done | Numbered | Referred | Looked | Given | Flagged
"""The answers to them."""

encode_request: Callable[[Request], bytes] = msgspec.msgpack.Encoder(enc_hook=hook).encode
encode_result: Callable[[Result], bytes] = msgspec.msgpack.Encoder(enc_hook=hook).encode
_requests = msgspec.msgpack.Decoder(AnyRequest, dec_hook=unhook)
_results = msgspec.msgpack.Decoder(AnyResult, dec_hook=unhook)


def decode_request(request: bytes) -> AnyRequest:
    """Raises ProtocolMismatch for what is no request."""
    try:
        found: AnyRequest = _requests.decode(request)
        return found
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise ProtocolMismatch(f"this is no request to a table's partition: {error}") from error


def decode_command(command: bytes) -> Command:
    """Raises Corrupt for what is no command."""
    try:
        found = _requests.decode(command)
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise Corrupt(f"this is no command of a table: {error}") from error
    if not isinstance(found, Command):
        raise Corrupt(f"a {type(found).__name__} is no command of a table")
    return found


def decode_result(result: bytes) -> AnyResult:
    """Raises ProtocolMismatch for what is no answer."""
    try:
        found: AnyResult = _results.decode(result)
        return found
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise ProtocolMismatch(f"this is no answer of a table's partition: {error}") from error
