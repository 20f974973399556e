"""The commands of a stream's partition: what its log has, and all that its replicated state depends on.

A command says what is decided, never what to decide: no time, lease or limit is looked at where it is applied. One that
a client asked for has the client's name and sequence, so that it is done once; the leader's own have neither.

Rows are offsets in the partition, as int64. In memory a reference is a `BatchRef` and rows are an array; in a log both
are bytes (`encode`, `decode`).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.errors import Corrupt
from dataplane.stream import requests as r
from dataplane.stream.block import Block, Value
from dataplane.stream.packing import hook, unhook
from dataplane.stream.page import Index
from dataplane.stream.pieces import Piece


class Command(msgspec.Struct, array_like=True, kw_only=True):
    """The root. Without a client: the leader's own."""

    client: str = ""
    sequence: int = 0


class Append(Command, tag=1, kw_only=True):
    """New rows, at `time_s` of the partition's clock. `nodes` have the columns too, besides those that store them."""

    ref: BatchRef
    versions: Index
    time_s: float
    groups: list[str | int] | None = None
    keys: list[str] = []
    digest: bytes = b""
    tags: dict[str, list[Value]] = {}
    lengths: dict[str, Index] = {}
    nodes: tuple[bytes, ...] = ()
    begin: tuple[int, float, str] | None = None
    """Of a row in progress: as `unfinished.Begin` has it."""
    parts: list[tuple[str, int, int]] = []
    """Of appends of several clients that came together: of each the client, its sequence, and its number of rows."""


class Extend(Command, tag=2, kw_only=True):
    """More columns for rows. `holds`: under which number each was delivered to who brings them, none: under none."""

    rows: Index
    ref: BatchRef
    lengths: dict[str, Index] = {}
    holds: Index = np.empty(0, np.int64)
    replace: bool = False
    nodes: tuple[bytes, ...] = ()


class Settle(Command, tag=3, kw_only=True):
    """A task has done these rows (ACKED), never gets them (EXPIRED), or has given them back once more (PENDING), for a
    `reason` that is logged if they are dead letters now."""

    task: int
    rows: Index
    state: int
    reason: str = ""


class Drop(Command, tag=4, kw_only=True):
    """No task is to be given these rows any more."""

    rows: Index


class Remove(Command, tag=5, kw_only=True):
    """These dropped rows, which nobody holds, go."""

    rows: Index


class End(Command, tag=50, kw_only=True):
    """These clients have ended: no sequence of theirs comes again."""

    clients: list[str]


class Unkeep(Command, tag=19, kw_only=True):
    """Nobody reads any more what was replaced in these patches, by number."""

    patches: Index


class PutBack(Command, tag=21, kw_only=True):
    """Rows of a snapshot, at `time_s` of the partition's clock."""

    block: Block
    time_s: float


class Grow(Command, tag=26, kw_only=True):
    """A piece of a row in progress comes, at `time_s` of the partition's clock."""

    row: int
    piece: Piece
    ref: BatchRef
    time_s: float
    lengths: dict[str, Index] = {}
    nodes: tuple[bytes, ...] = ()


class TakeUp(Command, tag=27, kw_only=True):
    """The client that has this token brings a row in progress from now on, at `time_s` of the partition's clock,
    instead of who had the token `before`."""

    row: int
    token: int
    before: int
    lease_s: float
    time_s: float


AnyCommand = (
    Append
    | Extend
    | Settle
    | Drop
    | Remove
    | End
    | Unkeep
    | PutBack
    | Grow
    | TakeUp
    | r.Lose
    | r.Return
    | r.TakeLost
    | r.Close
    | r.Clear
    | r.Configure
    | r.Open
    | r.Told
    | r.Restore
    | r.PutColumns
    | r.FinishRestore
    | r.GiveUp
)
"""A request of which nothing has to be decided is a command as it came."""


encode: Callable[[AnyCommand], bytes] = msgspec.msgpack.Encoder(enc_hook=hook).encode
_decoder = msgspec.msgpack.Decoder(AnyCommand, dec_hook=unhook)


def decode(command: bytes) -> AnyCommand:
    """Raises Corrupt for what is no command."""
    try:
        found: AnyCommand = _decoder.decode(command)
        return found
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise Corrupt(f"this is no command of a stream: {error}") from error
