"""The messages between two nodes. Like those between a client and its node, they are typed and validated, and never
unpickled.

A request has an `id`, and gets one reply with the same `id`; `Failure` is that of `wire.messages`. "You" is the node
that receives a request.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from dataplane.store.live_cells import LiveBlock
from dataplane.wire.messages import (
    ClockRead,
    Done,
    Failure,
    Figures,
    ListRings,
    Message,
    ReadClock,
    ReadRing,
    ReadStats,
    RingEvents,
    RingList,
)
from dataplane.wire.partition_messages import PartitionFrame
from dataplane.wire.row_messages import ListStreams
from dataplane.wire.shard_messages import Selection

MAJOR, MINOR = 4, 0
"""The version of the protocol between nodes. Another major version is refused; of two minor versions the lower is
used."""

MAX_SHARDS = 4096
"""The most shards that one request may name."""

MAX_INLINE, MAX_INLINE_ALL = 64 << 10, 1 << 20
"""The most bytes of a shard, and of all shards in one message, that are sent together with the description of the
shards. That saves a round trip and a connection."""

Identity = Annotated[bytes, msgspec.Meta(max_length=16)]
"""The identity of a node, or of its part of a stream or table: random bytes. The length is bounded because nodes store
a bounded number of them."""


class NumberedMessage(Message, frozen=True):
    """Base class of requests and their answers, which have the same `id`."""

    id: int


class DescribeShards(NumberedMessage, frozen=True, tag="describe"):
    """Ask for the descriptions of these shards. Answered by `Described`."""

    shards: list[int]


class Offer(NumberedMessage, frozen=True, tag="offer"):
    """Ask for permission to read a shard once, by the transport with this name. `node`: the node that asks. `owner`:
    the node that the shard belongs to; empty: you. `whole`: `node` reads the entire shard. You may refer it to another
    node with a copy, but not to those in `avoid`. `checks`: `node` reads into memory that is not in use yet, so it may
    get bytes from a disk, which it must check itself. Answered by `Offered`."""

    node: Identity
    shard: int
    transport: str
    timeout_s: float
    owner: Identity = b""
    whole: bool = False
    avoid: list[Identity] = []
    checks: bool = False


class Withdraw(NumberedMessage, frozen=True, tag="withdraw"):
    """End an offer: the shard was read, or will not be. `came`: the bytes that were read. `whole`: the node has the
    entire shard now. Answered by `Done`."""

    node: Identity
    ticket: bytes
    came: int = 0
    whole: bool = False


class RetainParts(NumberedMessage, frozen=True, tag="retain-parts"):
    """Create links to parts of your shards; see `wire.shard_messages.Retain`. Answered by `Linked`."""

    shards: list[tuple[int, Selection]]


class FreeParts(NumberedMessage, frozen=True, tag="free-parts"):
    """Free parts of shards; see `wire.shard_messages.Free`. A part without columns means the whole shard or link.
    Answered by `PartsFreed`."""

    parts: list[tuple[int, list[int], tuple[int, int, bytes]]]


class RetainColumns(NumberedMessage, frozen=True, tag="retain-columns"):
    """Retain the shards of these references that you store or have copies of, for the partition with the key `holder`.
    `number` names a claim of `node`; several requests may add shards to one claim. Answered by `Done`."""

    node: Identity
    number: int
    holder: str
    refs: list[bytes]


class ReleaseColumns(NumberedMessage, frozen=True, tag="release-columns"):
    """End the claim with this number: release its shards or, if `taken`, retain them until the partition releases them.
    Answered by `Done`."""

    node: Identity
    number: int
    taken: bool = False


class StreamDropped(NumberedMessage, frozen=True, tag="stream-dropped"):
    """The stream with this name and generation was dropped. Answered by `Done`."""

    name: str
    generation: str


class LedTables(NumberedMessage, frozen=True, tag="led-tables"):
    """Ask for the statistics of the first tables by name that you lead and whose names come after `after`. Answered by
    `Figures`."""

    after: str | None


class CopyShards(NumberedMessage, frozen=True, tag="copy-shards"):
    """Store replicas of these shards of yours, and of links to their parts, on the node `node`. `staged`: as in
    `TakeReplicas`. Answered by `Done`."""

    shards: list[int]
    node: Identity
    timeout_s: float
    staged: bool = False


class TakeReplicas(NumberedMessage, frozen=True, tag="take-replicas"):
    """Replicate these shards of the node `node`. `staged`: they are for a stream; if the node ends, free those that no
    stream needs. Answered by `Done`, once they are stored."""

    node: Identity
    shards: list[int]
    timeout_s: float
    staged: bool = False


class RetainReplicas(NumberedMessage, frozen=True, tag="retain-replicas"):
    """Note that these links to parts of shards of the node `node` were created. You have replicas of the shards.
    Answered by `Done`."""

    node: Identity
    links: list[tuple[int, Selection]]


class FreeReplicas(NumberedMessage, frozen=True, tag="free-replicas"):
    """Note that parts of shards of the node `node` were freed. A part without columns means the whole shard. Answered
    by `Done`."""

    node: Identity
    parts: list[tuple[int, list[int], tuple[int, int, bytes]]]


class FindReplicas(NumberedMessage, frozen=True, tag="find-replicas"):
    """Ask for your replicas of these shards of the node `node`. Answered by `FoundReplicas`."""

    node: Identity
    shards: list[int]


PeerRequest = (
    DescribeShards
    | Offer
    | Withdraw
    | RetainParts
    | FreeParts
    | RetainColumns
    | LedTables
    | ReleaseColumns
    | StreamDropped
    | CopyShards
    | TakeReplicas
    | RetainReplicas
    | FreeReplicas
    | FindReplicas
    | PartitionFrame
    | ReadClock
    | ListRings
    | ReadRing
    | ReadStats
    | ListStreams
)


Description = tuple[int, int, int, bytes, list[LiveBlock], bytes]
"""Of a shard: its size, rows, columns, encoded layout, live blocks and, if it is small, its bytes."""


class Described(NumberedMessage, frozen=True, tag="described"):
    """The descriptions of shards."""

    shards: list[Description]


class Linked(NumberedMessage, frozen=True, tag="linked"):
    """The links that were made, in the order of the request."""

    links: list[int]


class PartsFreed(NumberedMessage, frozen=True, tag="parts-freed"):
    """The parts were freed. `owned`: the shards of which other owners still need a part."""

    owned: list[int]


class Offered(NumberedMessage, frozen=True, tag="offered"):
    """The transport's ticket to read the bytes once. `holder`: the bytes must be requested from this node instead, and
    the ticket is only for `Withdraw`. `chunk`: if not 0, the bytes come from a disk; whole chunks of this size must be
    read, and compared with the checksums of the chunks in `sums` (xxh3-64, 8 bytes each, little-endian)."""

    ticket: bytes
    holder: Identity = b""
    chunk: int = 0
    sums: bytes = b""


class FoundReplicas(NumberedMessage, frozen=True, tag="found-replicas"):
    """The local numbers of the requested replicas; 0 for a shard of which the node has none."""

    numbers: list[int]


PeerReply = (
    Described
    | Offered
    | Figures
    | Linked
    | PartsFreed
    | Done
    | Failure
    | FoundReplicas
    | ClockRead
    | RingList
    | RingEvents
)
