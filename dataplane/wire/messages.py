"""Every message between a client and its node: typed, validated as it is decoded, never unpickled.

A message is one MessagePack array that begins with its tag. Requests carry an `id` that the client chose; each
gets exactly one reply with the same `id`, also when it was cancelled. Messages without an `id` get no reply.
A receiver ignores fields that a later minor version added at the end.

Descriptors travel beside a message: one for each `Grant` in it, in order.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from dataplane.stream import requests as r
from dataplane.stream.block import Block, Head
from dataplane.stream.packing import unhook
from dataplane.stream.pieces import Piece
from dataplane.stream.settings import Settings
from dataplane.table import requests as t

MAJOR, MINOR = 3, 0
"""The protocol's version. Another major is refused; the lower of two minors is spoken."""

MAX_FRAME = 4 << 20
"""Bytes of the largest message that is read."""

MAX_INLINE = 64 << 10
"""Bytes of the largest payload that travels in a message; what is larger is written into the arena."""

MAX_CARRIED = 16 << 10
"""Bytes of the shards that the answer to a `Pin` brings. To hold them, and to be told that they are held no more, takes
longer than to copy them."""

MAX_LAYOUT = 1 << 20
"""Bytes of the largest encoded layout of one shard."""

MAX_HANDLE = 4096
"""Bytes of the longest handle of memory that a client keeps."""

MAX_SCOPE = 1024
"""Characters of the longest name of a scope."""

MAX_ROWS = 1 << 16
"""Rows that one append brings or one delivery takes."""

STAGED = "\0"
"""What the name of a scope begins with that a client stages an append in: what is there when it goes, goes too."""

MAX_SHARDS = 1 << 16
"""Shards that one request may name or ask for."""

MAX_RETAINED = 4096
"""Shards to which one request may make links."""

MAX_LIVE = 1 << 23
"""Rows of one `LiveRows`: their bits are a quarter of a frame."""

MAX_WAITING = 1024
"""Requests of one client that may wait in a node at a time."""

MAX_WAITING_BYTES = 32 << 20
"""Bytes, about, of the requests of one client that wait."""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """The root of all messages."""


# What a client says


class Hello(Message, frozen=True, tag="hello"):
    """The first message. `label` is how the client is named to people, in `Backpressure` for one; `writes` whether it
    may come to need memory, and so is worth warming some for. Answered by `Welcome`."""

    id: int
    major: int
    minor: int
    label: str
    writes: bool


class Reserve(Message, frozen=True, tag="reserve"):
    """Room for shards of these sizes, in bytes. Answered by `Reserved`."""

    id: int
    sizes: list[int]
    timeout_s: float


class Seal(Message, frozen=True, tag="seal"):
    """Make reservations visible: (shard, encoded layout), and pin them if `hold`. Answered by `Done`."""

    id: int
    shards: list[tuple[int, bytes]]
    scope: str
    hold: bool


class Keep(Message, frozen=True, tag="keep"):
    """Shards whose bytes this client keeps in memory of its own: (size, encoded layout, handle by which other processes
    of the host map it). Answered by `Kept`."""

    id: int
    shards: list[tuple[int, bytes, bytes]]
    scope: str


class Landed(Message, frozen=True, tag="landed"):
    """The bytes of a kept shard are in this reservation. Answered by `Done`."""

    id: int
    shard: int
    reserved: int


class Stays(Message, frozen=True, tag="stays"):
    """A kept shard can not be brought to the arena, by an error as `errors.describe` gives it. Not answered."""

    shard: int
    name: str
    message: str
    fields: dict[str, Any]


class OfferKept(Message, frozen=True, tag="offer-kept"):
    """Have those of these shards of `owner` that its clients keep in memory of this kind ("cuda", "cpu") offered for
    one read each, from process to process. Answered by `KeptOffers`; so between nodes too."""

    id: int
    owner: bytes
    shards: list[int]
    kind: str
    timeout_s: float


class Offering(Message, frozen=True, tag="offering"):
    """A kept shard is offered to the reader of this number, at that address; with an empty one it can not be. Not
    answered."""

    shard: int
    reader: int
    address: str
    ticket: bytes


class Abort(Message, frozen=True, tag="abort"):
    """Give reservations back."""

    shards: list[int]


class Put(Message, frozen=True, tag="put"):
    """A small shard, with its bytes. Answered by `Stored`."""

    id: int
    payload: bytes
    layout: bytes
    scope: str
    timeout_s: float


Wanted: TypeAlias = tuple[bytes, int, list[tuple[list[int], tuple[int, int, bytes]]]]
"""A shard of another node, by node and number there, and which rows of which columns are to be read, as in `Free`."""


EncodedCut: TypeAlias = list[tuple[int, int, list[int | bytes], int]]
RowParts: TypeAlias = list[tuple[list[int], tuple[int, int, bytes], EncodedCut]]
"""What of the rows of a shard is wanted: columns by ordinal, rows, ascending, and slices of them (`batch.cuts`)."""

Step: TypeAlias = tuple[bytes, int, bytes, int]
"""A shard, by node and number there, and the delta by which another is made of it."""

ChunkPart: TypeAlias = tuple[bytes, list[Step]]
"""Of a chunk of weights, which bytes of the values of its only column are wanted and no more, as (start, stop), int64,
little-endian, ascending and apart, or none for all; and the steps by which it can be made, the last first."""


class Pin(Message, frozen=True, tag="pin"):
    """Hold shards of this node in memory, and those of others. Answered by `Held`, of these and then those. `apart`:
    the live bits of large shards are not told in the answer, but asked for by `LiveRows`. `devices`: shards of this
    node that a client keeps are not brought to the arena, but told with their handles. `carry`: where all of them
    together have no more than `MAX_CARRIED` bytes, the answer brings those, and nothing is held. `parts`: of each of
    the others what of its rows is wanted, where that is less than the whole rows; who does not know it brings those.
    `chunks`: of each of the others that it is a chunk of weights, and what of it is wanted; there are no `parts`."""

    id: int
    shards: list[int]
    timeout_s: float
    others: list[Wanted] = []
    apart: bool = False
    devices: bool = False
    carry: bool = False
    parts: list[RowParts] = []
    chunks: list[ChunkPart] = []


class LiveRows(Message, frozen=True, tag="live-rows"):
    """Which rows of a column of a held shard still count: `count` of them, at most `MAX_LIVE`, from `first` on.
    Answered by `LiveBits`."""

    id: int
    shard: int
    column: int
    first: int
    count: int


class FreeElsewhere(Message, frozen=True, tag="free-elsewhere"):
    """Free parts of another node's shards, as in `Free`. Answered by `Done`."""

    id: int
    node: bytes
    parts: list[tuple[int, list[int], tuple[int, int, bytes]]]


Selection: TypeAlias = list[tuple[list[int], tuple[int, int, bytes]]]
"""Rows of columns of a shard: ordinals, and rows as `Rows.encode`."""


class Retain(Message, frozen=True, tag="retain"):
    """Make a link to these rows of columns of each of these shards of the node `node`, so that they stay until it is
    freed too. Answered by `Retained`."""

    id: int
    node: bytes
    shards: list[tuple[int, Selection]]


class Prefetch(Message, frozen=True, tag="prefetch"):
    """Have these shards in memory: read back those of this node that are on disk, and fetch those of others; `parts` as
    in `Pin`. Answered by `Done`, when they were there."""

    id: int
    own: list[int]
    others: list[Wanted]
    timeout_s: float
    parts: list[RowParts] = []


class Replicate(Message, frozen=True, tag="replicate"):
    """Have these shards of this node on so many nodes in all. Answered by `Replicated`, when they are there."""

    id: int
    shards: list[int]
    replicas: int
    timeout_s: float


class Members(Message, frozen=True, tag="members"):
    """Who is in the cluster. Answered by `Figures`."""

    id: int


class Unpin(Message, frozen=True, tag="unpin"):
    """Drop one hold on each shard."""

    shards: list[int]


class InheritPins(Message, frozen=True, tag="inherit-pins"):
    """Hold all that the client of this token holds: from a process that forks, for the child. Answered by `Done`."""

    id: int
    token: bytes


class Free(Message, frozen=True, tag="free"):
    """Free whole shards, parts of shards (shard, columns, rows as `Rows.encode`), and a scope. Answered by `Done`."""

    id: int
    shards: list[int]
    parts: list[tuple[int, list[int], tuple[int, int, bytes]]]
    scope: str


class Stats(Message, frozen=True, tag="stats"):
    """Ask for the figures of the node, or of the member `node` of its cluster. Answered by `Figures`."""

    id: int
    node: bytes = b""


class Observe(Message, frozen=True, tag="observe"):
    """Ask for the node's figures for monitoring. Answered by `Figures`."""

    id: int


class ReadClock(Message, frozen=True, tag="read-clock"):
    """Ask for the monotonic clock of a node, empty for the one that is asked. Answered by `ClockRead`."""

    id: int
    node: bytes = b""


class ListRings(Message, frozen=True, tag="list-rings"):
    """Ask which processes of a node have rings of events. Answered by `RingList`."""

    id: int
    node: bytes = b""


class ReadRing(Message, frozen=True, tag="read-ring"):
    """Ask for the events of a ring that ended in the last `seconds`. Answered by `RingEvents`."""

    id: int
    node: bytes
    ring: int
    seconds: float


class Cancel(Message, frozen=True, tag="cancel"):
    """The client no longer waits for the request `request`."""

    request: int


class Leave(Message, frozen=True, tag="leave"):
    """The client goes; all that stays of it are its pins, until the connection ends."""


class Alive(Message, frozen=True, tag="alive"):
    """A sign of life, sent while the client holds reservations."""


MAX_REPORT = 128 << 10
"""Bytes of the largest performance graph of a client that a node keeps."""


class Report(Message, frozen=True, tag="report"):
    """The client's performance graph so far (`diagnosis.recorder`), in place of the one before. Not answered. Sent to
    nodes whose `Welcome` asks for it."""

    graph: bytes


class Graphs(Message, frozen=True, tag="graphs"):
    """The performance graphs of the node's clients, and what those waited for. Answered by `Figures`."""

    id: int


# What a client says of streams. `stream` is what `Opened` gave; rows are numbers, int64, little-endian.


class Open(Message, frozen=True, tag="open"):
    """A stream by its name, made if it is not there and `settings` are given. Answered by `Opened`."""

    id: int
    name: str
    settings: Settings | None


class Admit(Message, frozen=True, tag="admit"):
    """Leave to append so many rows and bytes of this policy version. `key`: that of the first row, empty for none, and
    the `digest` of the append. `handing`: shards that the client put and appends by reference, which go with it if it
    goes before the `Append`, or a `Cancel` of this. Answered by `Admitted`."""

    id: int
    stream: bytes
    rows: int
    nbytes: int
    version: int
    key: str
    digest: bytes
    timeout_s: float
    handing: list[int] = []


class GiveBack(Message, frozen=True, tag="give-back"):
    """What was admitted does not come."""

    stream: bytes
    ticket: int


class Append(Message, frozen=True, tag="append"):
    """Rows that were admitted. `staged` names the scope that their columns were put under, if they were. `groups` and
    `keys` are empty for none; `versions` and `lengths` are int64. `spares`: other nodes that have the columns too.
    `admitted`: the number of the `Admit` that said what is handed over; 0 for none. `timeout_s`: for how long to ask
    the leader, or somewhat longer. `begin`: of one row that is in progress, the token of who brings it, its lease in
    seconds, and the column whose tokens are counted. Answered by `Appended`."""

    id: int
    stream: bytes
    ticket: int
    staged: str
    ref: bytes
    keys: list[str]
    digest: bytes
    groups: list[str | int]
    versions: bytes
    tags: dict[str, list[str | int | float | bool | None]]
    lengths: dict[str, bytes]
    spares: list[bytes] = []
    admitted: int = 0
    timeout_s: float = 0.0
    begin: tuple[int, float, str] | None = None


class Inline(msgspec.Struct, frozen=True, array_like=True):
    """Columns that travel in a message, to become one small shard: their bytes, their encoded layout, and of each the
    bytes of its values."""

    payload: bytes
    layout: bytes
    nbytes: list[int]


class AppendInline(Message, frozen=True, tag="append-inline"):
    """`Admit`, `Put` and `Append` in one. `stream`, `keys` and what follows as in `Append`. Answered by `Appended`."""

    id: int
    stream: bytes
    columns: Inline
    keys: list[str]
    digest: bytes
    groups: list[str | int]
    versions: bytes
    tags: dict[str, list[str | int | float | bool | None]]
    lengths: dict[str, bytes]
    timeout_s: float
    begin: tuple[int, float, str] | None = None


class Extend(Message, frozen=True, tag="extend"):
    """More columns for rows, by number or by key. `holds`: for rows by number, under which number each was delivered.
    `piece`: they are the next piece of a row in progress. Answered by `Done`."""

    id: int
    stream: bytes
    staged: str
    ref: bytes
    rows: bytes
    holds: bytes
    keys: list[str]
    lengths: dict[str, bytes]
    replace: bool
    spares: list[bytes] = []
    piece: Piece | None = None


class ExtendInline(Message, frozen=True, tag="extend-inline"):
    """`Put` and `Extend` in one: fields as there. Answered by `Done`."""

    id: int
    stream: bytes
    columns: Inline
    rows: bytes
    holds: bytes
    keys: list[str]
    lengths: dict[str, bytes]
    replace: bool
    timeout_s: float
    piece: Piece | None = None


class TendRow(Message, frozen=True, tag="tend-row"):
    """About a row in progress, by who has this token: "take" it up, "hear" that its lease begins again, "release" it
    for others to take up, or "give-up": it is dropped. Answered by `UnfinishedRows` to "take", else by `Done`."""

    id: int
    stream: bytes
    key: str
    what: str
    token: int
    lease_s: float = 0.0


class DropStream(Message, frozen=True, tag="drop-stream"):
    """Free a stream, delivered or not. Answered by `Done`."""

    id: int
    stream: bytes


class AskStream(Message, frozen=True, tag="ask-stream"):
    """A request that the stream's partition decides as it is, for at most so many seconds. Answered by `StreamAnswer`.
    The node sets who asks, and of a replica what it received last."""

    id: int
    stream: bytes
    asked: r.FromClient
    timeout_s: float = 0.0


class TakeLost(Message, frozen=True, tag="take-lost"):
    """The rows that were lost with the nodes that held them, each told once. Answered by `LostRows`."""

    id: int
    stream: bytes


class Streams(Message, frozen=True, tag="streams"):
    """The figures of streams by name: of some whose names come after `after`, all of them after None. Answered by
    `Figures`, which are empty when there are no more. `node`: what that member of the cluster leads of them."""

    id: int
    after: str | None
    node: bytes = b""


class Restore(Message, frozen=True, tag="restore"):
    """A stream of this name and head, to be filled by `PutBack` and `Extend`. Answered by `Opened`. Nobody else sees it
    before `Restored`; it goes if this client goes before."""

    id: int
    name: str
    head: Head


class PutBack(Message, frozen=True, tag="put-back"):
    """Rows of a stream that is being restored. Answered by `Done`."""

    id: int
    stream: bytes
    block: Block


class PutColumns(Message, frozen=True, tag="put-columns"):
    """Columns of such rows, by number. `task`: for which they were held by who brought them, -1 for none. Answered by
    `Done`."""

    id: int
    stream: bytes
    staged: str
    ref: bytes
    rows: bytes
    task: int
    lengths: dict[str, bytes]


class Restored(Message, frozen=True, tag="restored"):
    """All of a stream that is being restored is there. Answered by `Done`."""

    id: int
    stream: bytes


# What a client says of tables


class AskTable(Message, frozen=True, tag="ask-table"):
    """A request that the table's partition decides as it is, for at most so many seconds. `table`: its name. `home`:
    what the last answer about it had, by which the node knows whether the client's table was lost; empty at first.
    `staged`, of a write: as in `Append`. `durable`: a table that this makes is durable, and one that is not is refused.
    Answered by `TableAnswer`. The node sets who asks."""

    id: int
    table: str
    home: bytes
    asked: t.FromClient
    timeout_s: float = 0.0
    staged: str = ""
    durable: bool = False


class WriteInline(Message, frozen=True, tag="write-inline"):
    """`Put` and a write in one: the columns that it brings, with those of the write's own `ref`. Answered as that."""

    id: int
    columns: Inline
    write: AskTable
    timeout_s: float


class Tables(Message, frozen=True, tag="tables"):
    """The figures of tables by name, as in `Streams`. Answered by `Figures`."""

    id: int
    after: str | None


Request = (
    Hello
    | Reserve
    | Seal
    | Keep
    | Landed
    | Stays
    | OfferKept
    | Offering
    | Abort
    | Put
    | Pin
    | LiveRows
    | Prefetch
    | FreeElsewhere
    | Retain
    | Replicate
    | Members
    | Unpin
    | InheritPins
    | Free
    | Stats
    | Observe
    | ReadClock
    | ListRings
    | ReadRing
    | Cancel
    | Leave
    | Alive
    | Report
    | Graphs
    | Open
    | Admit
    | GiveBack
    | Append
    | AppendInline
    | Extend
    | ExtendInline
    | TendRow
    | DropStream
    | AskStream
    | TakeLost
    | Streams
    | Restore
    | PutBack
    | PutColumns
    | Restored
    | AskTable
    | WriteInline
    | Tables
)


SHARED = frozenset(
    (
        Open,
        Admit,
        Append,
        AppendInline,
        Extend,
        ExtendInline,
        TendRow,
        DropStream,
        AskStream,
        TakeLost,
        Restore,
        PutBack,
        PutColumns,
        Restored,
        AskTable,
        WriteInline,
        Tables,
    )
)
"""The requests that other nodes of a cluster may have to answer."""


# What a node says


class Grant(Message, frozen=True):
    """A segment that the client has not seen: its number, its size in bytes, and whether it may write."""

    segment: int
    size: int
    writable: bool


class Welcome(Message, frozen=True, tag="welcome"):
    """The answer to `Hello`. `prewarm` bytes at the start of the granted segment are the client's to make ready.
    `token` names this client to a process that inherits its pins. `shared_s`: for which, beyond its own timeout, the
    answer may take to a request about streams or tables (`SHARED`): in a cluster, a failover. `ring`: bytes of the ring
    that the client records its events in, whose descriptor comes after those of the segments; 0 for none. `reports_s`:
    how often the client is to send a `Report`; 0 for never. `holds`: bytes that rows have room for, in memory and on
    disk; 0 where other nodes have room for them too."""

    id: int
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


class Reserved(Message, frozen=True, tag="reserved"):
    """(shard, segment, offset, size) for each size asked for. `gone`: segments granted before that are no more."""

    id: int
    extents: list[tuple[int, int, int, int]]
    grants: list[Grant]
    gone: list[int] = []


class Stored(Message, frozen=True, tag="stored"):
    """The number of the shard that was put."""

    id: int
    shard: int


class Retained(Message, frozen=True, tag="retained"):
    """The links that were made to shards of the node `node`, in the order of the request."""

    id: int
    node: bytes
    links: list[int]


class Kept(Message, frozen=True, tag="kept"):
    """The numbers of the shards that are kept."""

    id: int
    shards: list[int]


OfferTo: TypeAlias = tuple[int, str, str, str, float]
"""(number of a reader, the kind of its memory, where to listen for it, where it finds that if not there, seconds)."""


class Keeping(Message, frozen=True, tag="keeping"):
    """Of the shards that a client keeps: one to be brought to the arena, or to be offered, or whose memory may be used
    otherwise. Answers no request: `id` is 0."""

    id: int
    shard: int
    land: bool
    offer: OfferTo | None = None


KeptOffer: TypeAlias = tuple[int, int, bytes, bytes, str, bytes]
"""(shard, size, encoded layout, live bits, address, ticket)."""


class KeptOffers(Message, frozen=True, tag="kept-offers"):
    """Of the shards asked for those that are offered."""

    id: int
    offers: list[KeptOffer]


KeptOne: TypeAlias = tuple[int, int, int, bytes, bytes, bytes]
"""(shard, number under which its handle is held, size, encoded layout, live bits, handle)."""


class Held(Message, frozen=True, tag="held"):
    """Where each shard asked for is (`wire.places`), their layouts, each once, and the live bits of those of which some
    rows were freed (`Shard.live_bits`). `gone`: as in `Reserved`; `apart`: the numbers of those whose live bits are to
    be asked for; `kept`: see `Pin`; `carried`: the bytes of shards that are not held."""

    id: int
    places: bytes
    layouts: list[bytes]
    grants: list[Grant]
    lives: list[bytes] = []
    gone: list[int] = []
    apart: list[int] = []
    kept: list[KeptOne] = []
    carried: bytes = b""


class LiveBits(Message, frozen=True, tag="live-bits"):
    """One bit a row that was asked for, 1 for one that counts; empty where all do."""

    id: int
    bits: bytes


class Replicated(Message, frozen=True, tag="replicated"):
    """The other nodes that have the shards."""

    id: int
    nodes: list[bytes]


class Opened(Message, frozen=True, tag="opened"):
    """The stream, 8 bytes, what it was made with, and the mark of keys that it makes."""

    id: int
    stream: bytes
    settings: Settings
    mark: str


class Admitted(Message, frozen=True, tag="admitted"):
    """The append may come, with this ticket; 0: it was made before."""

    id: int
    stream: bytes
    ticket: int


class Appended(Message, frozen=True, tag="appended"):
    """The number of the first row, of rows without keys, and whether the rows are new: else they were there by an
    earlier call."""

    id: int
    first: int
    new: bool


class StreamAnswer(Message, frozen=True, tag="stream-answer"):
    """What the partition of a stream answered."""

    id: int
    stream: bytes
    result: r.ToClient


class TableAnswer(Message, frozen=True, tag="table-answer"):
    """What the partition of a table answered; `home` is for the next `AskTable`."""

    id: int
    home: bytes
    result: t.ToClient


class LostRows(Message, frozen=True, tag="lost-rows"):
    """The key, group and policy version of each, and which tasks had acked it: bit t for task t. `unnamed`: how many
    rows went with partitions of which every replica has died, by the node of their producers, in hex."""

    id: int
    rows: list[tuple[str, str | int | None, int, int]]
    unnamed: dict[str, int] = {}


class Done(Message, frozen=True, tag="done"):
    """It was done."""

    id: int


class Figures(Message, frozen=True, tag="figures"):
    """The node's statistics, as plain values by name."""

    id: int
    values: dict[str, Any]


class ClockRead(Message, frozen=True, tag="clock-read"):
    """Nanoseconds of the node's monotonic clock; of another node's, as the asked one's would say them at that moment:
    `ahead` is how far that clock is ahead of the asked node's, to within `error` nanoseconds."""

    id: int
    now: int
    ahead: int = 0
    error: int = 0


class RingList(Message, frozen=True, tag="ring-list"):
    """Of each ring its number, the process, its name, whether it lives, and of each thread its place, number, name."""

    id: int
    rings: list[tuple[int, int, str, bool, list[tuple[int, int, str]]]]


class RingEvents(Message, frozen=True, tag="ring-events"):
    """Events as `observe.ring` has them, the oldest first."""

    id: int
    events: bytes


class Failure(Message, frozen=True, tag="failure"):
    """The request failed: an error as `errors.describe` gives it. `id` 0: the connection is about to close."""

    id: int
    name: str
    message: str
    fields: dict[str, Any]


Reply = (
    Welcome
    | Reserved
    | Stored
    | Retained
    | Held
    | Kept
    | Keeping
    | KeptOffers
    | LiveBits
    | Replicated
    | Opened
    | Admitted
    | Appended
    | StreamAnswer
    | TableAnswer
    | LostRows
    | Done
    | ClockRead
    | RingList
    | RingEvents
    | Figures
    | Failure
)

CANCELLED = "Cancelled"
"""The `Failure.name` that answers a request which its client cancelled."""


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Decodes messages of these kinds, with the arrays and references in them."""
    return msgspec.msgpack.Decoder(kind, dec_hook=unhook)
