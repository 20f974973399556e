"""Requests to a partition of a stream. The answers are in `results`.

A request that changes rows names its client and a sequence number (from 1) and is executed once: if it is sent again,
it gets the first answer. Requests without a sequence number are sent by the driver, and may be executed again. Arrays
and references are encoded as in `commands`. The leader sets `time_s`, the time of the decision by the clock of the
partition.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dataplane.batch.ref import BatchRef
from dataplane.replication.outbox import ALL
from dataplane.stream.lease import Who
from dataplane.stream.packing import decoder, hook, union
from dataplane.stream.page import NONE, Index
from dataplane.stream.pieces import RowPiece
from dataplane.stream.sampler import BuiltIn, Fifo
from dataplane.stream.settings import StreamSettings
from dataplane.stream.snapshot_format import Head, Value

# isort: off
from dataplane.stream.results import (
    AdmitResult as AdmitResult,
    AppendResult as AppendResult,
    CandidateRows as CandidateRows,
    Delivered as Delivered,
    Succeeded as Succeeded,
    PartitionFigures as PartitionFigures,
    RetryResult as RetryResult,
    FoundRows as FoundRows,
    HeldRows as HeldRows,
    Letters as Letters,
    LostRowsResult as LostRowsResult,
    CommandRefused as CommandRefused,
    StreamResult as StreamResult,
    SnapshotRows as SnapshotRows,
    SnapshotTaken as SnapshotTaken,
    ToClient as ToClient,
    UnfinishedRows as UnfinishedRows,
    decode_result as decode_result,
    encode_result as encode_result,
    given as given,
)
# isort: on


class StreamRequest(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Base class of requests."""

    client: str = ""
    sequence: int = 0


class Admit(StreamRequest, frozen=True, tag=1, kw_only=True):
    """Ask for a permit to append. Answered by `AdmitResult`, or refused with `Backpressure`."""

    rows: int
    nbytes: int
    version: int


class GiveBack(StreamRequest, frozen=True, tag=2, kw_only=True):
    """Return a permit that is not used."""

    ticket: int


class Append(StreamRequest, frozen=True, tag=3, kw_only=True):
    """Append rows. Without a ticket they are admitted now or refused. Answered by `AppendResult`. `nodes`: nodes that
    have copies of the columns. `begin`: for a row in progress, fields of `pieces.RowBeginning`. `parts`: for merged
    appends, the client, sequence and number of rows of each; such a request has no client or sequence of its own."""

    ref: BatchRef
    versions: Index
    groups: list[str | int | None] | None = None
    keys: list[str] = []
    digest: bytes = b""
    tags: dict[str, list[Value]] = {}
    lengths: dict[str, Index] = {}
    nodes: tuple[bytes, ...] = ()
    ticket: int = 0
    begin: tuple[int, float, str] | None = None
    parts: list[tuple[str, int, int]] = []
    time_s: float = 0.0


class Extend(StreamRequest, frozen=True, tag=4, kw_only=True):
    """Add columns to rows, which are named by offset or by key. `holds`: the delivery number under which the producer
    held each row, or empty if it held none."""

    ref: BatchRef
    rows: Index = NONE
    keys: list[str] = []
    lengths: dict[str, Index] = {}
    holds: Index = NONE
    replace: bool = False
    nodes: tuple[bytes, ...] = ()


class AsMember(StreamRequest, frozen=True, kw_only=True):
    """Base class of requests of a consumer, which may be a replica of a member. `after`, `loop`: see `lease.Who`."""

    member: str = ""
    replica: int | None = None
    replicas: int = 0
    after: int | None = None
    loop: int = 0

    @property
    def who(self) -> Who:
        """The requester. Raises Misuse for an invalid replica."""
        return Who(self.client, self.member, self.replica, self.replicas, self.after, self.loop)


class Consume(AsMember, frozen=True, tag=5, kw_only=True):
    """Lease rows to a task. Answered by `Delivered`, or refused with `NotReady`. `chosen`, `expired`: the choice of a
    sampler that ran in the client, in place of `sampler`."""

    task: str
    columns: tuple[str, ...]
    rows: int
    min_rows: int = 1
    sampler: BuiltIn | None = Fifo()
    chosen: Index = NONE
    expired: Index = NONE
    lease_s: float = 60.0


class Open(StreamRequest, frozen=True, tag=6, kw_only=True):
    """The first request to a new partition: its settings, the prefix of the keys that it generates, and the number
    of its first row. Repeating it changes nothing."""

    settings: StreamSettings
    mark: str
    first: int = 0


class Ack(StreamRequest, frozen=True, tag=7, kw_only=True):
    """Acknowledge the rows of a grant."""

    grant: int
    replica: int | None = None


class Nack(StreamRequest, frozen=True, tag=8, kw_only=True):
    """Give back the rows of a grant. `seen`: whether it counts as a delivery. `reason`: for the log and
    `ListDeadLetters`, if the rows become dead letters."""

    grant: int
    replica: int | None = None
    seen: bool = True
    reason: str = ""


class Renew(StreamRequest, frozen=True, tag=9, kw_only=True):
    """Renew the lease of a grant."""

    grant: int
    replica: int | None = None


class Drop(StreamRequest, frozen=True, tag=10, kw_only=True):
    """Drop rows by offset, by key and by group: they are delivered to no task any more."""

    rows: Index = NONE
    keys: list[str] = []
    groups: list[str | int] = []


class Retry(StreamRequest, frozen=True, tag=48, kw_only=True):
    """Make dead letters of a task pending again, by key, or all. The leader replaces the keys by rows. Rows that are
    not dead letters of the task are left as they are. Answered by `RetryResult`."""

    task: str
    rows: Index = NONE
    keys: list[str] = []


class Close(StreamRequest, frozen=True, tag=11, kw_only=True):
    """Close the stream: further appends are refused."""


class Clear(StreamRequest, frozen=True, tag=12, kw_only=True):
    """Remove all rows, and close the stream."""


class TakeLost(StreamRequest, frozen=True, tag=13, kw_only=True):
    """Report lost rows, each once. Answered by `LostRowsResult`."""

    most: int


class Lose(StreamRequest, frozen=True, tag=14, kw_only=True):
    """Mark a node as lost, with all shards that it stored; with `before`, only its shards with lower numbers and its
    copies."""

    node: bytes
    before: int = ALL


class Return(StreamRequest, frozen=True, tag=42, kw_only=True):
    """Readmit a lost node. It stores shards from number `first` on."""

    node: bytes
    first: int


class EndClient(StreamRequest, frozen=True, tag=19, kw_only=True):
    """End the leases and permits of a client. `ended`: the client makes no more requests, so its sequence numbers are
    forgotten."""

    ended: bool = False


class Tick(StreamRequest, frozen=True, tag=20, kw_only=True):
    """Decide the commands that are due by time or by changes; see `StreamMachine.deadline`."""


class EndClients(StreamRequest, frozen=True, tag=21, kw_only=True):
    """End the leases and permits of all clients whose names begin with this prefix, and forget their sequence numbers.
    Mostly it is "NODE/LIFE/": a node and its incarnation."""

    clients: str


class OutboxReceived(StreamRequest, frozen=True, tag=22, kw_only=True):
    """Remove the entries up to this number from the outbox of a node that has received them."""

    node: bytes
    last: int


class Look(AsMember, frozen=True, tag=27, kw_only=True):
    """Ask for at most `most` candidates of a sampler. Refused with `NotReady` if nothing changed since `seen` (-1:
    never for this reason). Answered by `CandidateRows`, without rows if a grant of the member waits for this
    replica."""

    task: str
    columns: tuple[str, ...]
    most: int
    lengths: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    seen: int = -1


class Find(StreamRequest, frozen=True, tag=28, kw_only=True):
    """Ask for the rows with these keys. With a digest, rows are found only if an append with this digest had the same
    first key. Answered by `FoundRows`."""

    keys: list[str]
    digest: bytes = b""


class ListDeadLetters(StreamRequest, frozen=True, tag=29, kw_only=True):
    """Ask for the first `most` dead letters of a task, with the columns that all of them have. Answered by
    `Letters`."""

    task: str
    most: int


class ListHeldColumns(StreamRequest, frozen=True, tag=41, kw_only=True):
    """Ask for the columns on a restarted node that rows need. The answer begins with the column batch numbered `after`,
    without its first `pieces` references. Answered by `HeldRows`."""

    node: bytes
    after: int = -1
    pieces: int = 0


class Measure(StreamRequest, frozen=True, tag=30, kw_only=True):
    """Ask for the statistics of the partition. Answered by `PartitionFigures`."""


class TakeSnapshot(StreamRequest, frozen=True, tag=31, kw_only=True):
    """Take a snapshot of the rows. It exists until this client releases it or ends, or another node leads. Until then
    no node frees columns that the snapshot needs. Answered by `SnapshotTaken`."""


class ReadSnapshot(StreamRequest, frozen=True, tag=32, kw_only=True):
    """Read the rows of a snapshot with the numbers from `first` to `first + count - 1`. Answered by `SnapshotRows`."""

    snapshot: int
    first: int
    count: int


class ReleaseSnapshot(StreamRequest, frozen=True, tag=33, kw_only=True):
    """Release a snapshot."""

    snapshot: int


class Restore(StreamRequest, frozen=True, tag=34, kw_only=True):
    """Begin to restore a checkpoint with this head into an empty partition. Its rows follow by `RestoreBlock`."""

    head: Head


class RestoreBlock(StreamRequest, frozen=True, tag=35, kw_only=True):
    """Restore rows of a checkpoint, under their old numbers, in ascending blocks. `block`: an encoded `RowsState`."""

    block: bytes
    time_s: float = 0.0


class RestoreColumnBatch(StreamRequest, frozen=True, tag=36, kw_only=True):
    """Restore columns of restored rows. `task`: the task for which their producer held the rows, -1 for none."""

    rows: Index
    ref: BatchRef
    task: int = -1
    nodes: tuple[bytes, ...] = ()


class FinishRestore(StreamRequest, frozen=True, tag=37, kw_only=True):
    """End the restoration. New rows get numbers that the old stream cannot have used since the checkpoint."""


class BegunRow(StreamRequest, frozen=True, kw_only=True):
    """Base class of requests about a row in progress, named by number or by key."""

    row: int = -1
    key: str = ""


class ExtendRow(BegunRow, frozen=True, tag=43, kw_only=True):
    """Add a piece to a row in progress. Answered by `AppendResult`. The answer's `new` is False if the piece was added
    before, or if the producer with the token `piece.token` has finished the row already, or given it up."""

    piece: RowPiece
    ref: BatchRef
    lengths: dict[str, Index] = {}
    nodes: tuple[bytes, ...] = ()
    time_s: float = 0.0


class ResumeRow(BegunRow, frozen=True, tag=44, kw_only=True):
    """Make this client the producer of a row in progress. Without `row` and `key`, the first row without a producer is
    taken. Answered by `UnfinishedRows` with this row, or without rows if every row has a producer. `before`: the token
    of the former producer, which the leader sets."""

    token: int
    lease_s: float
    before: int = 0
    time_s: float = 0.0


class AbandonRow(BegunRow, frozen=True, tag=45, kw_only=True):
    """Drop a row in progress, at the request of its producer."""

    token: int


class RenewRow(BegunRow, frozen=True, tag=46, kw_only=True):
    """Renew the lease of a row in progress or, with `free`, end it. Without `row` and `key`, the row is found by the
    token; nothing happens if there is none."""

    token: int
    free: bool = False


class ListUnfinished(StreamRequest, frozen=True, tag=47, kw_only=True):
    """Ask for the first `most` rows in progress after the row `after`. Answered by `UnfinishedRows`."""

    most: int
    after: int = -1


FromClient = (
    Consume
    | Look
    | Ack
    | Nack
    | Renew
    | Drop
    | Retry
    | Close
    | ListDeadLetters
    | Measure
    | ListUnfinished
    | ResumeRow
    | AbandonRow
    | RenewRow
    | TakeSnapshot
    | ReadSnapshot
    | ReleaseSnapshot
)
"""The requests that clients make themselves, inside an `AskStream`."""

READS = (Look, Find, ListDeadLetters, ListHeldColumns, Measure, ReadSnapshot, ListUnfinished)
"""The requests that change nothing."""

encode_request: Callable[[StreamRequest], bytes] = msgspec.msgpack.Encoder(enc_hook=hook).encode
decode_request: Callable[[bytes], StreamRequest] = decoder(
    union(globals(), StreamRequest), "request to a stream's partition"
)
"""The decoded request. Raises ProtocolMismatch."""
