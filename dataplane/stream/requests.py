"""What a stream's partition is asked; what it answers is in `results`.

Each request that changes rows names its client and a sequence, from 1, and is done once: sent again, it is answered as
it was the first time. Those without are the driver's own, and may be repeated. Arrays and references are as in
`commands`.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.errors import Corrupt, ProtocolMismatch
from dataplane.stream.block import Block, Head, Value
from dataplane.stream.lease import Who
from dataplane.stream.packing import hook, unhook
from dataplane.stream.page import Index
from dataplane.stream.pieces import Piece
from dataplane.stream.sampler import BuiltIn, Fifo
from dataplane.stream.settings import Settings

# isort: off
from dataplane.stream.results import (
    Admitted as Admitted,
    AnyResult as AnyResult,
    Appended as Appended,
    Delivered as Delivered,
    Done as Done,
    Figures as Figures,
    Found as Found,
    GrantGiven as GrantGiven,
    Held as Held,
    Letters as Letters,
    LostRows as LostRows,
    Refused as Refused,
    Result as Result,
    Shown as Shown,
    SnapshotRows as SnapshotRows,
    SnapshotTaken as SnapshotTaken,
    TicketGiven as TicketGiven,
    ToClient as ToClient,
    UnfinishedRows as UnfinishedRows,
    decode_result as decode_result,
    encode_result as encode_result,
    given as given,
)
# isort: on

_NONE: Index = np.empty(0, np.int64)


class Request(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The root."""

    client: str = ""
    sequence: int = 0


class Admit(Request, frozen=True, tag=1, kw_only=True):
    """Leave to append: answered by `Admitted`, or refused by `Backpressure`."""

    rows: int
    nbytes: int
    version: int


class GiveBack(Request, frozen=True, tag=2, kw_only=True):
    """What was admitted under the ticket does not come."""

    ticket: int


class Append(Request, frozen=True, tag=3, kw_only=True):
    """New rows; without a ticket, if they are let in now. Answered by `Appended`. `parts`: as the command has it; the
    request has no client and no sequence of its own then."""

    ref: BatchRef
    versions: Index
    groups: list[str | int] | None = None
    keys: list[str] = []
    digest: bytes = b""
    tags: dict[str, list[Value]] = {}
    lengths: dict[str, Index] = {}
    nodes: tuple[bytes, ...] = ()
    ticket: int = 0
    begin: tuple[int, float, str] | None = None
    parts: list[tuple[str, int, int]] = []


class Extend(Request, frozen=True, tag=4, kw_only=True):
    """More columns for rows, by offset or by key."""

    ref: BatchRef
    rows: Index = _NONE
    keys: list[str] = []
    lengths: dict[str, Index] = {}
    holds: Index = _NONE
    replace: bool = False
    nodes: tuple[bytes, ...] = ()


class Consume(Request, frozen=True, tag=5, kw_only=True):
    """Rows of a task. Answered by `Delivered`, or refused by `NotReady`. `chosen` and `expired`, without a sampler:
    what the client's own made of what it was shown. `after`: as `lease.Who` has it."""

    task: str
    columns: tuple[str, ...]
    rows: int
    min_rows: int = 1
    sampler: BuiltIn | None = Fifo()
    chosen: Index = _NONE
    expired: Index = _NONE
    lease_s: float = 60.0
    member: str = ""
    replica: int | None = None
    replicas: int = 0
    after: int | None = None

    @property
    def who(self) -> Who:
        """Who asks. Raises Misuse for a replica that can not be."""
        return Who(self.client, self.member, self.replica, self.replicas, self.after)


class Open(Request, frozen=True, tag=6, kw_only=True):
    """The first request to a new partition: what the stream was made with, what the keys begin with that the partition
    makes, and the number of its first row. May be repeated."""

    settings: Settings
    mark: str
    first: int = 0


class Ack(Request, frozen=True, tag=7, kw_only=True):
    """The rows of a grant are done."""

    grant: int
    replica: int | None = None


class Nack(Request, frozen=True, tag=8, kw_only=True):
    """The rows of a grant are given back; `seen`: that counts as a delivery. `reason`: why, for the log."""

    grant: int
    replica: int | None = None
    seen: bool = True
    reason: str = ""


class Renew(Request, frozen=True, tag=9, kw_only=True):
    """The lease of a grant begins again."""

    grant: int
    replica: int | None = None


class Drop(Request, frozen=True, tag=10, kw_only=True):
    """No task is to be given these rows any more: by offset, by key, and those of groups."""

    rows: Index = _NONE
    keys: list[str] = []
    groups: list[str | int] = []


class Close(Request, frozen=True, tag=11, kw_only=True):
    """Nothing is appended any more."""


class Clear(Request, frozen=True, tag=12, kw_only=True):
    """Everything goes."""


class TakeLost(Request, frozen=True, tag=13, kw_only=True):
    """Tell of lost rows, each once: answered by `LostRows`."""

    most: int


class Lose(Request, frozen=True, tag=14, kw_only=True):
    """As the command of this name."""

    node: bytes


class Return(Request, frozen=True, tag=42, kw_only=True):
    """As the command of this name."""

    node: bytes
    first: int


class Configure(Request, frozen=True, tag=15, kw_only=True):
    """As the command of this name."""

    settings: Settings


class Leave(Request, frozen=True, tag=19, kw_only=True):
    """The client has gone: what it holds goes to others. `ended`: it sends nothing again."""

    ended: bool = False


class Tick(Request, frozen=True, tag=20, kw_only=True):
    """Time has passed, or something has changed: see `StreamMachine.deadline`."""


class LeaveAll(Request, frozen=True, tag=21, kw_only=True):
    """All clients have ended whose names begin with this, which is a node's name and, mostly, the number of its life:
    "NODE/LIFE/"."""

    clients: str


class Told(Request, frozen=True, tag=22, kw_only=True):
    """The node knows the entries of its outbox up to this number."""

    node: bytes
    last: int


class Look(Request, frozen=True, tag=27, kw_only=True):
    """What a sampler may know of up to `most` rows that are ready, if something changed since `seen` (-1: never), else
    refused by `NotReady`. Answered by `Shown`, without rows where the replica is to be given what others were."""

    task: str
    columns: tuple[str, ...]
    most: int
    lengths: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    seen: int = -1
    member: str = ""
    replica: int | None = None
    replicas: int = 0
    after: int | None = None

    @property
    def who(self) -> Who:
        """As `Consume.who`."""
        return Who(self.client, self.member, self.replica, self.replicas, self.after)


class Find(Request, frozen=True, tag=28, kw_only=True):
    """Which rows have these keys; with a digest, if the first is the first key of an append of this digest. `token`:
    who has it may have finished a row in progress, or given it up (-2). Answered by `Found`."""

    keys: list[str]
    digest: bytes = b""
    token: int = 0


class DeadLetters(Request, frozen=True, tag=29, kw_only=True):
    """The first `most` rows that the task gave back too often, with the columns that all of them have. Answered by
    `Letters`."""

    task: str
    most: int


class Holding(Request, frozen=True, tag=41, kw_only=True):
    """What rows need of a node, which was started again: by the numbers of what brought it, after this one. Answered by
    `Held`."""

    node: bytes
    after: int = -1


class Measure(Request, frozen=True, tag=30, kw_only=True):
    """The figures of the partition. Answered by `Figures`."""


class TakeSnapshot(Request, frozen=True, tag=31, kw_only=True):
    """The partition's rows as they are now, kept for this client until it releases them, goes, or another leads.
    Meanwhile no node is told of columns that rows need no more since. Answered by `SnapshotTaken`."""


class ReadSnapshot(Request, frozen=True, tag=32, kw_only=True):
    """The rows of a snapshot from number `first` on, `count` numbers. Answered by `SnapshotRows`."""

    snapshot: int
    first: int
    count: int


class ReleaseSnapshot(Request, frozen=True, tag=33, kw_only=True):
    """The snapshot is not needed any more."""

    snapshot: int


class Restore(Request, frozen=True, tag=34, kw_only=True):
    """The partition, which is empty, begins as that of this head; its rows are to be `PutBack`."""

    head: Head


class PutBack(Request, frozen=True, tag=35, kw_only=True):
    """Rows of a snapshot, under their numbers, blocks in the order of their rows."""

    block: Block


class PutColumns(Request, frozen=True, tag=36, kw_only=True):
    """Columns of rows that were put back; `task`: for which they were held by who brought them, -1 for none."""

    rows: Index
    ref: BatchRef
    task: int = -1
    lengths: dict[str, Index] = {}
    nodes: tuple[bytes, ...] = ()


class FinishRestore(Request, frozen=True, tag=37, kw_only=True):
    """All is put back. Rows that come get numbers that the stream before has not given since the snapshot."""


class Grow(Request, frozen=True, tag=43, kw_only=True):
    """A piece of a row in progress. Answered by `Appended`; not new: it came before."""

    row: int
    piece: Piece
    ref: BatchRef
    lengths: dict[str, Index] = {}
    nodes: tuple[bytes, ...] = ()


class TakeUp(Request, frozen=True, tag=44, kw_only=True):
    """This client brings a row in progress from now on, or the first that is free (-1). Answered by `UnfinishedRows`,
    of this one; of none where none is free."""

    row: int
    token: int
    lease_s: float


class GiveUp(Request, frozen=True, tag=45, kw_only=True):
    """As the command of this name."""

    row: int
    token: int


class Hear(Request, frozen=True, tag=46, kw_only=True):
    """The lease of a row in progress begins again or, with `free`, ends."""

    row: int
    token: int
    free: bool = False


class ListUnfinished(Request, frozen=True, tag=47, kw_only=True):
    """The first `most` rows in progress. Answered by `UnfinishedRows`."""

    most: int


AnyRequest = (
    Admit
    | GiveBack
    | Append
    | Extend
    | Consume
    | Open
    | Ack
    | Nack
    | Renew
    | Drop
    | Close
    | Clear
    | TakeLost
    | Lose
    | Return
    | Configure
    | Leave
    | Tick
    | LeaveAll
    | Told
    | Look
    | Find
    | DeadLetters
    | Holding
    | Measure
    | TakeSnapshot
    | ReadSnapshot
    | ReleaseSnapshot
    | Restore
    | PutBack
    | PutColumns
    | FinishRestore
    | Grow
    | TakeUp
    | GiveUp
    | Hear
    | ListUnfinished
)

FromClient = (
    Consume
    | Look
    | Ack
    | Nack
    | Renew
    | Drop
    | Close
    | DeadLetters
    | Measure
    | ListUnfinished
    | TakeSnapshot
    | ReadSnapshot
    | ReleaseSnapshot
)
"""The requests that a client makes of a stream as they are."""

encode_request: Callable[[Request], bytes] = msgspec.msgpack.Encoder(enc_hook=hook).encode
_requests = msgspec.msgpack.Decoder(AnyRequest, dec_hook=unhook)


def decode_request(request: bytes) -> AnyRequest:
    """Raises ProtocolMismatch for what is no request."""
    try:
        found: AnyRequest = _requests.decode(request)
        return found
    except (msgspec.MsgspecError, ValueError, TypeError, Corrupt) as error:
        raise ProtocolMismatch(f"this is no request to a stream's partition: {error}") from error
