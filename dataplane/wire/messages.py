"""The messages between a client and its node: typed, validated as they are decoded, never unpickled.

A message is one MessagePack array that begins with its tag. A request carries an `id` chosen by the client and gets
exactly one reply with the same `id`, also if it was cancelled. A message without an `id` gets no reply. A receiver
ignores fields that a later minor version appended.

File descriptors travel beside a message: one for each `Grant` in it, in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from operator import or_
from typing import Any, TypeAlias

import msgspec

from dataplane.stream import requests as r
from dataplane.stream.packing import unhook
from dataplane.stream.pieces import Piece
from dataplane.stream.settings import Settings
from dataplane.stream.snapshot_format import Head
from dataplane.table import requests as t

MAJOR, MINOR = 3, 0
"""Version of the protocol. Another major version is refused; of two minor versions the lower is spoken."""

MAX_FRAME = 4 << 20
"""Bytes of the largest message."""

MAX_INLINE = 64 << 10
"""Bytes of the largest payload inside a message. Larger payloads are written into the arena."""

MAX_CARRIED = 16 << 10
"""Bytes of shards that the answer to a `Pin` may contain instead of pinning them: copying so few is faster than a
pin and its release."""

MAX_LAYOUT = 1 << 20
"""Bytes of the largest encoded layout of one shard."""

MAX_HANDLE = 4096
"""Bytes of the longest handle of memory that a client keeps for itself."""

MAX_SCOPE = 1024
"""Characters of the longest name of a scope."""

MAX_ROWS = 1 << 16
"""Rows of one append or one delivery."""

STAGED = "\0"
"""Prefix of the scopes in which clients stage columns. Rows left in such a scope are freed when its client goes."""

MAX_SHARDS = 1 << 16
"""Shards of one request."""

MAX_RETAINED = 4096
"""Links that one request may create."""

MAX_LIVE = 1 << 23
"""Rows of one `LiveRows`: their bits fill a quarter of a frame."""

MAX_WAITING = 1024
"""Requests of one client that may wait in a node at the same time."""

MAX_WAITING_BYTES = 32 << 20
"""Approximate bytes of the waiting requests of one client."""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base class of all messages."""


# Messages of a client


class FromClient(Message, frozen=True):
    """Base class of the messages of a client."""


class Request(FromClient, frozen=True):
    """Base class of messages that are answered, by one with the same `id`."""

    id: int


class SharedRequest(Request, frozen=True):
    """Base class of requests that other nodes of a cluster may have to answer."""


class Hello(Request, frozen=True, tag="hello"):
    """The first message of a connection. `label` names the client in `Backpressure` and statistics. `writes`:
    whether the client may write, so that warming memory for it is worth while. Answered by `Welcome`."""

    major: int
    minor: int
    label: str
    writes: bool


class Reserve(Request, frozen=True, tag="reserve"):
    """Reserve memory for shards of these sizes, in bytes. Answered by `Reserved`."""

    sizes: list[int]
    timeout_s: float


class Seal(Request, frozen=True, tag="seal"):
    """Make reservations readable: (shard, encoded layout). With `hold` they are pinned too. Answered by `Done`."""

    shards: list[tuple[int, bytes]]
    scope: str
    hold: bool


class Keep(Request, frozen=True, tag="keep"):
    """Register shards whose bytes stay in memory of this client: (size, encoded layout, handle by which other
    processes of the host map the memory). Answered by `Kept`."""

    shards: list[tuple[int, bytes, bytes]]
    scope: str


class Landed(Request, frozen=True, tag="landed"):
    """The bytes of a kept shard were copied into this reservation. Answered by `Done`."""

    shard: int
    reserved: int


class Stays(FromClient, frozen=True, tag="stays"):
    """A kept shard cannot be copied into the arena; the error is as `errors.describe` returns it. Not answered."""

    shard: int
    name: str
    message: str
    fields: dict[str, Any]


class Abort(FromClient, frozen=True, tag="abort"):
    """Cancel reservations."""

    shards: list[int]


class Put(Request, frozen=True, tag="put"):
    """Store a small shard whose bytes are in the message. Answered by `Stored`."""

    payload: bytes
    layout: bytes
    scope: str
    timeout_s: float


Wanted: TypeAlias = tuple[bytes, int, list[tuple[list[int], tuple[int, int, bytes]]]]
"""A shard of another node (node, number there), and the columns and rows to read, as in `Free`."""


EncodedCut: TypeAlias = list[tuple[int, int, list[int | bytes], int]]
RowParts: TypeAlias = list[tuple[list[int], tuple[int, int, bytes], EncodedCut]]
"""The part of a shard that is read: columns by ordinal, ascending rows, and slices of the rows (`batch.cuts`)."""

Step: TypeAlias = tuple[bytes, int, bytes, int]
"""A shard (node, number there) and the delta that turns the shard before it into this one."""

ChunkPart: TypeAlias = tuple[bytes, list[Step]]
"""The part of a chunk of weights that is read: byte ranges (start, stop) of its only column, as ascending, disjoint
little-endian int64 pairs, empty for all bytes; and the deltas from which the chunk can be computed, the last first."""


class Pin(Request, frozen=True, tag="pin"):
    """Pin shards of this node and of others. Answered by `Held`, in the order `shards`, `others`.

    apart: the live bits of large shards are left out of the answer and read by `LiveRows`.
    devices: shards that a client keeps are not copied into the arena; the answer has their handles.
    carry: if all shards together have at most `MAX_CARRIED` bytes, the answer contains the bytes and nothing is pinned.
    parts: for each of `others`, the part of its rows that is read, if that is less than whole rows.
    chunks: for each of `others`, the part that is read, if they are chunks of weights; `parts` is empty then.
    """

    shards: list[int]
    timeout_s: float
    others: list[Wanted] = []
    apart: bool = False
    devices: bool = False
    carry: bool = False
    parts: list[RowParts] = []
    chunks: list[ChunkPart] = []


class LiveRows(Request, frozen=True, tag="live-rows"):
    """Ask which rows of a column of a pinned shard were not freed: `count` rows (at most `MAX_LIVE`) from `first`
    on. Answered by `LiveBits`."""

    shard: int
    column: int
    first: int
    count: int


class FreeElsewhere(Request, frozen=True, tag="free-elsewhere"):
    """Free parts of shards of another node, as in `Free`. Answered by `Done`."""

    node: bytes
    parts: list[tuple[int, list[int], tuple[int, int, bytes]]]


Selection: TypeAlias = list[tuple[list[int], tuple[int, int, bytes]]]
"""Rows of columns of a shard: column ordinals, and the rows as `Rows.encode`."""


class Retain(Request, frozen=True, tag="retain"):
    """Create links to rows of columns of shards of the node `node`. The rows stay until each link to them is freed
    too. Answered by `Retained`."""

    node: bytes
    shards: list[tuple[int, Selection]]


class Prefetch(Request, frozen=True, tag="prefetch"):
    """Load shards into memory: those of this node from disk, those of others over the network; `parts` as in `Pin`.
    Answered by `Done` once all are loaded."""

    own: list[int]
    others: list[Wanted]
    timeout_s: float
    parts: list[RowParts] = []


class Replicate(Request, frozen=True, tag="replicate"):
    """Copy shards of this node until each is on `replicas` nodes. Answered by `Replicated` once they are."""

    shards: list[int]
    replicas: int
    timeout_s: float


class Members(Request, frozen=True, tag="members"):
    """Ask for the members of the cluster. Answered by `Figures`."""


class Unpin(FromClient, frozen=True, tag="unpin"):
    """Release one pin on each shard."""

    shards: list[int]


class InheritPins(Request, frozen=True, tag="inherit-pins"):
    """Pin everything that the client with this token has pinned: a forked child sends it. Answered by `Done`."""

    token: bytes


class Free(Request, frozen=True, tag="free"):
    """Free whole shards, parts of shards (shard, columns, rows as `Rows.encode`), and all shards of a scope.
    Answered by `Done`."""

    shards: list[int]
    parts: list[tuple[int, list[int], tuple[int, int, bytes]]]
    scope: str


class Stats(Request, frozen=True, tag="stats"):
    """Ask for the statistics of this node, or of the member `node`. Answered by `Figures`."""

    node: bytes = b""


class Observe(Request, frozen=True, tag="observe"):
    """Ask for the metrics of the node. Answered by `Figures`."""


class ReadClock(Request, frozen=True, tag="read-clock"):
    """Ask for the monotonic clock of a node; empty: of this one. Answered by `ClockRead`."""

    node: bytes = b""


class ListRings(Request, frozen=True, tag="list-rings"):
    """Ask which processes of a node record events. Answered by `RingList`."""

    node: bytes = b""


class ReadRing(Request, frozen=True, tag="read-ring"):
    """Ask for the events of a ring that ended in the last `seconds`. Answered by `RingEvents`."""

    node: bytes
    ring: int
    seconds: float


class Cancel(FromClient, frozen=True, tag="cancel"):
    """The client no longer waits for the answer to `request`."""

    request: int


class Leave(FromClient, frozen=True, tag="leave"):
    """The client disconnects. Only its pins remain, until the connection ends."""


class Alive(FromClient, frozen=True, tag="alive"):
    """A heartbeat, sent while the client holds reservations."""


MAX_REPORT = 128 << 10
"""Bytes of the largest performance graph of a client."""


class Report(FromClient, frozen=True, tag="report"):
    """The performance graph of the client so far (`diagnosis.recorder`); it replaces the one before. Sent if
    `Welcome` asks for it. Not answered."""

    graph: bytes


class Graphs(Request, frozen=True, tag="graphs"):
    """Ask for the performance graphs of the clients of all nodes, with the causes of their waits. Answered by
    `Figures`."""


# A client's messages about streams. `stream`: the token from `Opened`; rows are numbers, int64, little-endian.


class Open(SharedRequest, frozen=True, tag="open"):
    """Open a stream by name. If it does not exist and `settings` are given, it is created. Answered by `Opened`."""

    name: str
    settings: Settings | None


class Admit(SharedRequest, frozen=True, tag="admit"):
    """Ask for a permit to append so many rows and bytes of this policy version. `key` is the key of the first row
    (empty: none), `digest` that of the append. `handing`: shards that the client put before and appends by
    reference; they are freed if the client goes before its `Append` or the `Cancel` of this request. Answered by
    `Admitted`."""

    stream: bytes
    rows: int
    nbytes: int
    version: int
    key: str
    digest: bytes
    timeout_s: float
    handing: list[int] = []


class GiveBack(FromClient, frozen=True, tag="give-back"):
    """Return a permit that is not used."""

    stream: bytes
    ticket: int


class Inline(msgspec.Struct, frozen=True, array_like=True):
    """Columns inside a message, which become one small shard: their bytes, the encoded layout, and the bytes of the
    values of each column."""

    payload: bytes
    layout: bytes
    nbytes: list[int]


class Append(SharedRequest, frozen=True, tag="append"):
    """Append rows. Their `columns` are in the message, which does the work of `Admit` and `Put` too; or the rows were
    admitted (`ticket`), and `ref` names their columns. `staged`: the scope in which those were staged, if any. `groups`
    and `keys` are empty for none; `versions` and `lengths` are int64. `spares`: other nodes that have copies of the
    columns. `admitted`: the id of the `Admit` that named shards in `handing`, else 0. `timeout_s`: how long to wait, or
    to ask the leader, at least. `begin`, of one row that is still in progress: the token of its producer, the lease in
    seconds, and the column whose tokens are counted. Answered by `Appended`."""

    stream: bytes
    keys: list[str]
    digest: bytes
    groups: list[str | int]
    versions: bytes
    tags: dict[str, list[str | int | float | bool | None]]
    begin: tuple[int, float, str] | None
    lengths: dict[str, bytes]
    timeout_s: float = 0.0
    columns: Inline | None = None
    ticket: int = 0
    staged: str = ""
    ref: bytes = b""
    spares: list[bytes] = []
    admitted: int = 0


class Extend(SharedRequest, frozen=True, tag="extend"):
    """Add columns to rows, named by number or by key. `holds`: for rows named by number, the delivery number of
    each. `piece`: the columns are the next piece of a row in progress. `columns`, or `staged`, `ref` and `spares`, and
    `timeout_s`: as in `Append`. Answered by `Done`."""

    stream: bytes
    rows: bytes
    holds: bytes
    keys: list[str]
    lengths: dict[str, bytes]
    replace: bool
    timeout_s: float = 0.0
    piece: Piece | None = None
    columns: Inline | None = None
    staged: str = ""
    ref: bytes = b""
    spares: list[bytes] = []


class DropStream(SharedRequest, frozen=True, tag="drop-stream"):
    """Free a stream with all its rows, delivered or not. Answered by `Done`."""

    stream: bytes


class AskStream(SharedRequest, frozen=True, tag="ask-stream"):
    """A request for the partition of a stream, which may wait up to `timeout_s` seconds. Answered by `StreamAnswer`.
    The node fills in the client's name and, for a replica, the last grant that it received."""

    stream: bytes
    asked: r.FromClient
    timeout_s: float = 0.0


class TakeLost(SharedRequest, frozen=True, tag="take-lost"):
    """Ask for rows that were lost with the nodes that stored them. Each is reported once. Answered by `LostRows`."""

    stream: bytes


class Streams(Request, frozen=True, tag="streams"):
    """Ask for the statistics of streams whose names come after `after` (None: all), a page at a time. Answered by
    `Figures`, empty after the last. `node`: only of the streams that this member leads."""

    after: str | None
    node: bytes = b""


class Restore(SharedRequest, frozen=True, tag="restore"):
    """Create a stream from the head of a checkpoint, to be filled by `PutBack` and `PutColumns`. No other client
    sees it before `Restored`; it is dropped if this client goes before. Answered by `Opened`."""

    name: str
    head: Head


class PutBack(SharedRequest, frozen=True, tag="put-back"):
    """Rows of a stream that is being restored, an encoded `RowsState`. Answered by `Done`."""

    stream: bytes
    block: bytes


class PutColumns(SharedRequest, frozen=True, tag="put-columns"):
    """Columns of such rows, named by number. `task`: the task for which their producer held the rows, -1 for none.
    Answered by `Done`."""

    stream: bytes
    staged: str
    ref: bytes
    rows: bytes
    task: int


class Restored(SharedRequest, frozen=True, tag="restored"):
    """Publish a stream that is being restored: it is complete. Answered by `Done`."""

    stream: bytes


# A client's messages about tables


class AskTable(SharedRequest, frozen=True, tag="ask-table"):
    """A request for the partition of the table `table`, which may wait up to `timeout_s` seconds. `home`: copied
    from the last `TableAnswer`, so that the node notices if the table that the client knew was lost; empty at first.
    `staged`, of a write: as in `Append`. `columns`, of a write: in the message, and written together with those of its
    `ref`. `durable`: if the request creates the table, it is durable; a table that is not is refused. Answered by
    `TableAnswer`. The node fills in the client's name."""

    table: str
    home: bytes
    asked: t.FromClient
    timeout_s: float = 0.0
    staged: str = ""
    durable: bool = False
    columns: Inline | None = None


class Tables(SharedRequest, frozen=True, tag="tables"):
    """Ask for the statistics of tables, as `Streams`. Answered by `Figures`."""

    after: str | None


# Messages of a node


class Reply(Message, frozen=True):
    """Base class of the messages of a node. `id`: of the request that it answers, or 0."""

    id: int


class Grant(Message, frozen=True):
    """A segment that the client has not seen: its number, its size in bytes, and whether it may write."""

    segment: int
    size: int
    writable: bool


class Welcome(Reply, frozen=True, tag="welcome"):
    """The answer to `Hello`. `prewarm` bytes at the start of the granted segment are for the client to populate.
    `token` names this client to a process that inherits its pins. `shared_s`: for which, beyond its own timeout, the
    answer may take to a request about streams or tables (`SharedRequest`): in a cluster, a failover. `ring`: bytes of
    the ring that the client records its events in, whose descriptor comes after those of the segments; 0 for none.
    `reports_s`: how often the client is to send a `Report`; 0 for never. `holds`: the bytes of rows that fit, in memory
    and on disk; 0 if other nodes have room for them too."""

    major: int
    minor: int
    node: bytes
    capacity: int
    lease_s: float
    grants: list[Grant]
    prewarm: int
    token: bytes = b""
    shared_s: float = 5.0
    ring: int = 0
    reports_s: float = 0.0
    holds: int = 0


class Reserved(Reply, frozen=True, tag="reserved"):
    """(shard, segment, offset, size) of each reservation. `gone`: segments granted before that no longer exist."""

    extents: list[tuple[int, int, int, int]]
    grants: list[Grant]
    gone: list[int] = []


class Stored(Reply, frozen=True, tag="stored"):
    """The number of the stored shard."""

    shard: int


class Retained(Reply, frozen=True, tag="retained"):
    """The links to shards of the node `node`, in the order of the request."""

    node: bytes
    links: list[int]


class Kept(Reply, frozen=True, tag="kept"):
    """The numbers of the registered shards."""

    shards: list[int]


class Keeping(Reply, frozen=True, tag="keeping"):
    """To the client that keeps a shard: copy it into the arena (`land`), or reuse its memory. Answers no request: `id`
    is 0."""

    shard: int
    land: bool


KeptOne: TypeAlias = tuple[int, int, int, bytes, bytes, bytes]
"""(shard, number of the pin on its handle, size, encoded layout, live bits, handle)."""


class Held(Reply, frozen=True, tag="held"):
    """The place of each pinned shard (`wire.places`), each distinct layout once, and the live bits of shards of
    which rows were freed (`Shard.live_bits`). `gone`: as in `Reserved`. `apart`: shards whose live bits are read by
    `LiveRows`. `kept`: shards that a client keeps. `carried`: the bytes of shards that were not pinned."""

    places: bytes
    layouts: list[bytes]
    grants: list[Grant]
    lives: list[bytes] = []
    gone: list[int] = []
    apart: list[int] = []
    kept: list[KeptOne] = []
    carried: bytes = b""


class LiveBits(Reply, frozen=True, tag="live-bits"):
    """A bit for each row: 1 if it was not freed. Empty if none was."""

    bits: bytes


class Replicated(Reply, frozen=True, tag="replicated"):
    """The other nodes that have the shards."""

    nodes: list[bytes]


class Opened(Reply, frozen=True, tag="opened"):
    """The token of the stream (8 bytes), its settings, and the prefix of the keys that it generates."""

    stream: bytes
    settings: Settings
    mark: str


class Admitted(Reply, frozen=True, tag="admitted"):
    """The permit. 0: the same append was made before."""

    stream: bytes
    ticket: int


class Appended(Reply, frozen=True, tag="appended"):
    """The number of the first row. `new`: False if the same append was made before."""

    first: int
    new: bool


class StreamAnswer(Reply, frozen=True, tag="stream-answer"):
    """The answer of the partition of a stream."""

    stream: bytes
    result: r.ToClient


class TableAnswer(Reply, frozen=True, tag="table-answer"):
    """The answer of the partition of a table. `home` goes into the next `AskTable`."""

    home: bytes
    result: t.ToClient


class LostRows(Reply, frozen=True, tag="lost-rows"):
    """Key, group and policy version of each lost row, and the tasks that had acked it (bit t for task t). `unnamed`:
    rows of partitions that lost every replica: their count by the node of their producers, in hex."""

    rows: list[tuple[str, str | int | None, int, int]]
    unnamed: dict[str, int] = {}


class Done(Reply, frozen=True, tag="done"):
    """Success."""


class Figures(Reply, frozen=True, tag="figures"):
    """Statistics, as plain values by name."""

    values: dict[str, Any]


class ClockRead(Reply, frozen=True, tag="clock-read"):
    """Nanoseconds of the node's monotonic clock. For another node: its clock in terms of the asked node's, which it
    is ahead of by `ahead` nanoseconds, give or take `error`."""

    now: int
    ahead: int = 0
    error: int = 0


class RingList(Reply, frozen=True, tag="ring-list"):
    """For each ring its number, the process id, its name, whether it lives, and the place, number and name of each
    thread."""

    rings: list[tuple[int, int, str, bool, list[tuple[int, int, str]]]]


class RingEvents(Reply, frozen=True, tag="ring-events"):
    """Events in the format of `observe.ring`, the oldest first."""

    events: bytes


class Failure(Reply, frozen=True, tag="failure"):
    """The request failed with this error (`errors.describe`). `id` 0: the node is about to close the connection."""

    name: str
    message: str
    fields: dict[str, Any]


CANCELLED = "Cancelled"
"""`Failure.name` of the answer to a request that its client cancelled."""


def _every(base: type[Message]) -> Iterator[type[Message]]:
    """The messages of a base class."""
    for kind in base.__subclasses__():
        if kind.__struct_config__.tag is None:
            yield from _every(kind)
        else:
            yield kind


AnyRequest: Any = reduce(or_, _every(FromClient))
"""The messages of a client, to decode one."""

AnyReply: Any = reduce(or_, _every(Reply))
"""The messages of a node, to decode one."""


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder of these messages, and of the arrays and references in them."""
    return msgspec.msgpack.Decoder(kind, dec_hook=unhook)
