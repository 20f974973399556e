"""The messages between two nodes. As between a client and its node: typed, validated, never unpickled.

A request has an `id`, and gets one reply with the same; `Failure` is that of `wire.messages`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from dataplane.wire.messages import (
    ClockRead,
    Done,
    Failure,
    Figures,
    ListRings,
    Message,
    ReadClock,
    ReadRing,
    RingEvents,
    RingList,
    Stats,
)
from dataplane.wire.partition_messages import Frame
from dataplane.wire.row_messages import Streams
from dataplane.wire.shard_messages import Selection

MAJOR, MINOR = 1, 1
"""The version of the protocol between nodes. Another major version is refused; of two minor versions the lower is
used."""

MAX_SHARDS = 4096
"""Shards that one request may name."""

MAX_INLINE, MAX_INLINE_ALL = 64 << 10, 1 << 20
"""Bytes of a shard, and of all in one message, that are sent with their description: one round trip and one
connection less."""

Identity = Annotated[bytes, msgspec.Meta(max_length=16)]
"""The identity of a node, or of its part of a stream or table: random bytes. The length is bounded because nodes store
a bounded number of them."""


class Numbered(Message, frozen=True):
    """Base class of requests and their answers, which have the same `id`."""

    id: int


class Describe(Numbered, frozen=True, tag="describe"):
    """Ask for the descriptions of these shards. Answered by `Described`. `apart`: the live bits of large shards are
    not in the answer, but asked for by `LiveRows`."""

    shards: list[int]
    apart: bool = False


class LiveRows(Numbered, frozen=True, tag="live-rows"):
    """Ask which rows of a column of a shard are not freed, as the message with this name between a node and its
    clients. Answered by `LiveBits`."""

    shard: int
    column: int
    first: int
    count: int


class Offer(Numbered, frozen=True, tag="offer"):
    """Ask to read a shard once, by the transport with this name. `node` asks; the shard is `owner`'s, or that of the
    node asked. With `whole` the entire shard will be at `node`, which may be referred to another node for it, but not
    to those in `avoid`. With `checks` it reads into memory that is not in use yet, and so may get bytes that it must
    check itself. Answered by `Offered`."""

    node: Identity
    shard: int
    transport: str
    timeout_s: float
    owner: Identity = b""
    whole: bool = False
    avoid: list[Identity] = []
    checks: bool = False


class Withdraw(Numbered, frozen=True, tag="withdraw"):
    """The offer was read, or will not be: so many bytes `came`, and with `whole` the entire shard is at `node` now.
    Answered by `Done`."""

    node: Identity
    ticket: bytes
    came: int = 0
    whole: bool = False


class RetainParts(Numbered, frozen=True, tag="retain-parts"):
    """Make links to parts of your shards, as `wire.shard_messages.Retain`. Answered by `Linked`."""

    shards: list[tuple[int, Selection]]


class FreeParts(Numbered, frozen=True, tag="free-parts"):
    """Free parts of shards, as `wire.shard_messages.Free`; without columns, all that the number names. Answered by
    `PartsFreed`."""

    parts: list[tuple[int, list[int], tuple[int, int, bytes]]]


class RetainColumns(Numbered, frozen=True, tag="retain-columns"):
    """Keep the shards of these references that you store or have copies of, for the partition with the key `holder`.
    More may come with `node`'s number. Answered by `Done`."""

    node: Identity
    number: int
    holder: str
    refs: list[bytes]


class ReleaseColumns(Numbered, frozen=True, tag="release-columns"):
    """Release the shards retained with this number; or, if `taken`, keep them until the holder says otherwise. Answered
    by `Done`."""

    node: Identity
    number: int
    taken: bool = False


class StreamDropped(Numbered, frozen=True, tag="stream-dropped"):
    """The stream with this name and generation was dropped. Answered by `Done`."""

    name: str
    generation: str


class LedTables(Numbered, frozen=True, tag="led-tables"):
    """Ask for the statistics of the first tables by name that you lead, after this name. Answered by `Figures`."""

    after: str | None


class TakeReplicas(Numbered, frozen=True, tag="take-replicas"):
    """Replicate these shards of the node `node`. Answered by `Done`, once they are stored."""

    node: Identity
    shards: list[int]
    timeout_s: float


class RetainReplicas(Numbered, frozen=True, tag="retain-replicas"):
    """These links were made to parts of shards of the node `node`, of which you keep replicas. Answered by `Done`."""

    node: Identity
    links: list[tuple[int, Selection]]


class FreeReplicas(Numbered, frozen=True, tag="free-replicas"):
    """Parts of shards of the node `node` were freed, as in `FreeParts`; without columns, all of a shard. Answered by
    `Done`."""

    node: Identity
    parts: list[tuple[int, list[int], tuple[int, int, bytes]]]


class FindReplicas(Numbered, frozen=True, tag="find-replicas"):
    """Ask which of these shards of the node `node` are replicated here. Answered by `FoundReplicas`."""

    node: Identity
    shards: list[int]


PeerRequest = (
    Describe
    | LiveRows
    | Offer
    | Withdraw
    | RetainParts
    | FreeParts
    | RetainColumns
    | LedTables
    | ReleaseColumns
    | StreamDropped
    | TakeReplicas
    | RetainReplicas
    | FreeReplicas
    | FindReplicas
    | Frame
    | ReadClock
    | ListRings
    | ReadRing
    | Stats
    | Streams
)


class Described(Numbered, frozen=True, tag="described"):
    """For each shard: its size, rows, columns, encoded layout, live bits and, if they are few, its bytes. `apart`:
    the numbers of those whose live bits must be asked for."""

    shards: list[tuple[int, int, int, bytes, bytes, bytes]]
    apart: list[int] = []


class Linked(Numbered, frozen=True, tag="linked"):
    """The links that were made, in the order of the request."""

    links: list[int]


class PartsFreed(Numbered, frozen=True, tag="parts-freed"):
    """The parts are freed. `owned`: the shards of which other owners still need a part."""

    owned: list[int]


class LiveBits(Numbered, frozen=True, tag="live-bits"):
    """One bit for each requested row, 1 if it is not freed; empty if none is freed."""

    bits: bytes


class Offered(Numbered, frozen=True, tag="offered"):
    """The transport's ticket to read the bytes, once. With `holder` the bytes must be asked for at that node, and the
    ticket is for `Withdraw` only. With `chunk` they come from a disk: entire chunks of so many bytes must be read, and
    compared with their xxh3-64, 8 bytes each in `sums`, little-endian."""

    ticket: bytes
    holder: Identity = b""
    chunk: int = 0
    sums: bytes = b""


class FoundReplicas(Numbered, frozen=True, tag="found-replicas"):
    """The local numbers of the requested shards; 0 for one that is not here."""

    numbers: list[int]


PeerReply = (
    Described
    | LiveBits
    | Offered
    | Figures
    | Linked
    | PartsFreed
    | Done
    | Failure
    | FoundReplicas
    | Figures
    | ClockRead
    | RingList
    | RingEvents
)
