"""Commands of a partition of a stream: the entries of its log. The replicated state depends on them alone.

A command states a decision: applying it reads no clock, lease or limit. A command of a client has the name and the
sequence of the client, so that it is applied once; commands of the leader itself have neither.

Rows are offsets in the partition (int64). In memory a reference is a `BatchRef` and rows are an array; in a log both
are bytes (`encode`, `decode`).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.errors import Corrupt
from dataplane.stream import requests as r
from dataplane.stream.packing import hook, unhook
from dataplane.stream.page import Index
from dataplane.stream.pieces import RowPiece
from dataplane.stream.snapshot_format import Value


class Command(msgspec.Struct, array_like=True, kw_only=True):
    """Base class of commands. Without a client: the leader's own."""

    client: str = ""
    sequence: int = 0


class AppendCommand(Command, tag=1, kw_only=True):
    """New rows, at `time_s` of the clock of the partition. `nodes`: nodes that have copies of the columns."""

    ref: BatchRef
    versions: Index
    time_s: float
    groups: list[str | int | None] | None = None
    keys: list[str] = []
    digest: bytes = b""
    tags: dict[str, list[Value]] = {}
    lengths: dict[str, Index] = {}
    nodes: tuple[bytes, ...] = ()
    begin: tuple[int, float, str] | None = None
    """For a row in progress, the fields of `unfinished.Begin`."""
    parts: list[tuple[str, int, int]] = []
    """For merged appends: the client, sequence and number of rows of each."""


class ExtendCommand(Command, tag=2, kw_only=True):
    """More columns for rows. `holds`: the delivery number under which the producer held each row; empty: none."""

    rows: Index
    ref: BatchRef
    lengths: dict[str, Index] = {}
    holds: Index = np.empty(0, np.int64)
    replace: bool = False
    nodes: tuple[bytes, ...] = ()


class SettleCommand(Command, tag=3, kw_only=True):
    """Settle rows for a task: acknowledged (ACKED), never to be delivered (EXPIRED), or given back (PENDING).
    `reason`: for the log and for users, if they become dead letters."""

    task: int
    rows: Index
    state: int
    reason: str = ""


class DropCommand(Command, tag=4, kw_only=True):
    """Drop rows: they are delivered to no task any more."""

    rows: Index


class RemoveCommand(Command, tag=5, kw_only=True):
    """Remove dropped rows that are not leased."""

    rows: Index


class EndCommand(Command, tag=50, kw_only=True):
    """Forget the sequences of clients that have ended."""

    clients: list[str]


class FreeReplacedCommand(Command, tag=19, kw_only=True):
    """Free these replaced column batches (by number), which have no readers any more."""

    batches: Index


class RestoreBlockCommand(Command, tag=21, kw_only=True):
    """Restore rows of a checkpoint, at `time_s` of the clock of the partition."""

    block: bytes
    time_s: float


class ExtendRowCommand(Command, tag=26, kw_only=True):
    """Add a piece to a row in progress, at `time_s` of the clock of the partition."""

    row: int
    piece: RowPiece
    ref: BatchRef
    time_s: float
    lengths: dict[str, Index] = {}
    nodes: tuple[bytes, ...] = ()


class ResumeRowCommand(Command, tag=27, kw_only=True):
    """Replace the producer of a row in progress, which has the token `before`, by the client with this token, at
    `time_s` of the clock of the partition."""

    row: int
    token: int
    before: int
    lease_s: float
    time_s: float


class AbandonRowCommand(Command, tag=28, kw_only=True):
    """Drop a row in progress, by its producer with this token."""

    row: int
    token: int


AnyCommand = (
    AppendCommand
    | ExtendCommand
    | SettleCommand
    | DropCommand
    | RemoveCommand
    | EndCommand
    | FreeReplacedCommand
    | RestoreBlockCommand
    | ExtendRowCommand
    | ResumeRowCommand
    | r.Lose
    | r.Return
    | r.TakeLost
    | r.Close
    | r.Clear
    | r.Open
    | r.OutboxReceived
    | r.Restore
    | r.RestoreColumnBatch
    | r.FinishRestore
    | AbandonRowCommand
)
"""All commands. Some requests need no decision and are commands themselves."""


encode: Callable[[AnyCommand], bytes] = msgspec.msgpack.Encoder(enc_hook=hook).encode
_decoder = msgspec.msgpack.Decoder(AnyCommand, dec_hook=unhook)


def decode(command: bytes) -> AnyCommand:
    """The decoded command. Raises Corrupt."""
    try:
        found: AnyCommand = _decoder.decode(command)
        return found
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise Corrupt(f"this is no command of a stream: {error}") from error
