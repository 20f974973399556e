"""Commands of a partition of a stream: the entries of its log. The replicated state depends on them alone.

A command states a decision: applying it reads no clock, lease or limit. Most are requests: the leader resolves keys to
rows and sets the time (`time_s`, of the clock of the partition). A command of a client has the name and the sequence of
the client, so that it is applied once; commands of the leader itself have neither.

Rows are offsets in the partition (int64). In memory a reference is a `BatchRef` and rows are an array; in a log both
are bytes (`encode`, `decode`).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dataplane.errors import Corrupt
from dataplane.stream import requests as r
from dataplane.stream.packing import decoder, hook
from dataplane.stream.page import Index


class Command(msgspec.Struct, array_like=True, kw_only=True):
    """Base class of commands. Without a client: the leader's own."""

    client: str = ""
    sequence: int = 0


class SettleCommand(Command, tag=51, kw_only=True):
    """Settle rows for a task: acknowledged (ACKED), never to be delivered (EXPIRED), or given back (PENDING).
    `reason`: for the log and for users, if they become dead letters."""

    task: int
    rows: Index
    state: int
    reason: str = ""


class RemoveCommand(Command, tag=52, kw_only=True):
    """Remove dropped rows that are not leased."""

    rows: Index


class EndCommand(Command, tag=50, kw_only=True):
    """Forget the sequences of clients that have ended."""

    clients: list[str]


class FreeReplacedCommand(Command, tag=53, kw_only=True):
    """Free these replaced column batches (by number), which have no readers any more."""

    batches: Index


AnyCommand = (
    SettleCommand
    | RemoveCommand
    | EndCommand
    | FreeReplacedCommand
    | r.Append
    | r.Extend
    | r.Drop
    | r.Retry
    | r.ExtendRow
    | r.ResumeRow
    | r.AbandonRow
    | r.Lose
    | r.Return
    | r.TakeLost
    | r.Close
    | r.Clear
    | r.Open
    | r.OutboxReceived
    | r.Restore
    | r.RestoreBlock
    | r.RestoreColumnBatch
    | r.FinishRestore
)
"""All commands. The command of a request that changes rows is the request itself, as its leader completes it."""


encode: Callable[[AnyCommand], bytes] = msgspec.msgpack.Encoder(enc_hook=hook).encode
decode: Callable[[bytes], AnyCommand] = decoder(AnyCommand, "command of a stream", Corrupt)
"""The decoded command. Raises Corrupt."""
