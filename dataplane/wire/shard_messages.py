"""The messages between a client and its node about shards."""

from __future__ import annotations

from typing import Any, TypeAlias

from dataplane.store.budget import Purpose
from dataplane.store.live_cells import LiveBlock
from dataplane.wire.messages import FromClient, Reply, Request, SegmentGrant

MAX_INLINE = 64 << 10
"""The most bytes of a payload inside a message. The client writes larger ones into the arena."""

MAX_CARRIED = 16 << 10
"""The most bytes of shards that the answer to a `PinShards` contains in place of pins: copying them is faster than
pinning and releasing."""

MAX_LAYOUT = 1 << 20
"""Bytes of the largest encoded layout of one shard."""

MAX_HANDLE = 4096
"""The most bytes of the handle of memory that a client keeps for itself."""

MAX_SCOPE = 1024
"""Characters of the longest name of a scope."""

MAX_SHARDS = 1 << 16
"""The most shards of one request."""

MAX_RETAINED = 4096
"""The most links that one request may create."""


class Reserve(Request, frozen=True, tag="reserve"):
    """Reserve memory for shards of these sizes, in bytes. Answered by `Reserved`."""

    sizes: list[int]
    timeout_s: float
    purpose: Purpose = "put"


class SealShards(Request, frozen=True, tag="seal"):
    """Turn reservations, given as (shard, encoded layout), into shards, which can be read. `hold`: pin them too.
    Answered by `Done`."""

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


class PutShard(Request, frozen=True, tag="put"):
    """Store a small shard whose bytes are in the message. Answered by `ShardStored`."""

    payload: bytes
    layout: bytes
    scope: str
    timeout_s: float
    purpose: Purpose = "put"


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


class PinShards(Request, frozen=True, tag="pin"):
    """Pin shards of this node and of others. Answered by `Held`, in the order `shards`, `others`.

    devices: shards that a client keeps are not copied into the arena; the answer has their handles.
    carry: if all shards together have at most `MAX_CARRIED` bytes, the answer contains the bytes and nothing is pinned.
    parts: for each of `others`, the part of its rows that is read, if that is less than whole rows.
    chunks: for each of `others`, the part that is read, if they are chunks of weights; `parts` is empty then.
    """

    shards: list[int]
    timeout_s: float
    others: list[Wanted] = []
    devices: bool = False
    carry: bool = False
    parts: list[RowParts] = []
    chunks: list[ChunkPart] = []


Selection: TypeAlias = list[tuple[list[int], tuple[int, int, bytes]]]
"""Rows of columns of a shard: column ordinals, and the rows as `Rows.encode`."""


class Retain(Request, frozen=True, tag="retain"):
    """Create links to rows of columns of shards of the node `node`. The rows stay until each link to them is freed
    too. Answered by `Retained`."""

    node: bytes
    shards: list[tuple[int, Selection]]


class Prefetch(Request, frozen=True, tag="prefetch"):
    """Load shards into memory: those of this node from disk, those of others over the network; `parts` as in
    `PinShards`. Answered by `Done` once all are loaded."""

    own: list[int]
    others: list[Wanted]
    timeout_s: float
    parts: list[RowParts] = []


class ReplicateShards(Request, frozen=True, tag="replicate"):
    """Copy shards, given by node and number, until the loss of any `replicas` - 1 nodes loses none. `staged`: the
    copies are for a stream that is to take the shards. Answered by `ShardsReplicated` once that is so."""

    shards: list[tuple[bytes, int]]
    replicas: int
    timeout_s: float
    staged: bool = False


class UnpinShards(FromClient, frozen=True, tag="unpin"):
    """Release one pin on each shard."""

    shards: list[int]


class InheritPins(Request, frozen=True, tag="inherit-pins"):
    """Pin everything that the client with this token has pinned: a forked child sends it. Answered by `Done`."""

    token: bytes


class Free(Request, frozen=True, tag="free"):
    """Free whole shards, parts of shards (shard, columns, rows as `Rows.encode`), and all shards of a scope. `node`: if
    given, free only `parts`, which are of shards of that node; a part without columns means the whole shard. Answered
    by `Done`."""

    shards: list[int] = []
    parts: list[tuple[int, list[int], tuple[int, int, bytes]]] = []
    scope: str = ""
    node: bytes = b""


# Messages of a node


class Reserved(Reply, frozen=True, tag="reserved"):
    """(shard, segment, offset, size) of each reservation. `gone`: segments granted before that no longer exist."""

    extents: list[tuple[int, int, int, int]]
    grants: list[SegmentGrant]
    gone: list[int] = []


class ShardStored(Reply, frozen=True, tag="stored"):
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


KeptOne: TypeAlias = tuple[int, int, int, bytes, list[LiveBlock], bytes]
"""(shard, number of the pin on its handle, size, encoded layout, live blocks, handle)."""


class Held(Reply, frozen=True, tag="held"):
    """The place of each pinned shard (`wire.places`), each distinct layout once, and the live blocks of shards of which
    rows were freed. `gone`: as in `Reserved`. `kept`: shards whose bytes are in a client's memory, with the handle that
    opens them. `carried`: the bytes of shards that were not pinned."""

    places: bytes
    layouts: list[bytes]
    grants: list[SegmentGrant]
    lives: list[list[LiveBlock]] = []
    gone: list[int] = []
    kept: list[KeptOne] = []
    carried: bytes = b""


class ShardsReplicated(Reply, frozen=True, tag="replicated"):
    """The other nodes that have the shards."""

    nodes: list[bytes]
