"""The messages between a client and its node about rows of streams and tables.

The field `stream` is the token from `Opened`. Rows are named by their numbers, int64, little-endian.
"""

from __future__ import annotations

import msgspec

from dataplane.stream import requests as r
from dataplane.stream.pieces import RowPiece
from dataplane.stream.settings import StreamSettings
from dataplane.stream.snapshot_format import Head
from dataplane.table import requests as t
from dataplane.wire.messages import FromClient, Reply, Request, SharedRequest

MAX_ROWS = 1 << 16
"""The most rows of one append or one delivery."""

STAGED = "\0"
"""Prefix of the scopes in which clients stage columns. Shards that are still in such a scope are freed when its client
ends."""


class OpenStream(SharedRequest, frozen=True, tag="open"):
    """Open a stream by name. If it does not exist and `settings` are given, it is created. Answered by
    `Opened`."""

    name: str
    settings: StreamSettings | None


class AdmitRows(SharedRequest, frozen=True, tag="admit"):
    """Ask for a permit to append this number of rows and bytes, of this policy version. `key`: the key of the first row
    (empty: none). `digest`: the digest of the append. `handing`: shards that the client has put and will append by
    reference; they are freed if the client ends before it sends the `AppendRows`, or the `Cancel` of this request.
    Answered by `RowsAdmitted`."""

    stream: bytes
    rows: int
    nbytes: int
    version: int
    key: str
    digest: bytes
    timeout_s: float
    handing: list[int] = []


class ReturnPermit(FromClient, frozen=True, tag="give-back"):
    """Return a permit that is not used."""

    stream: bytes
    ticket: int


class Inline(msgspec.Struct, frozen=True, array_like=True):
    """Columns inside a message, which become one small shard: the bytes of the shard, its encoded layout, and the size
    of the values of each column."""

    payload: bytes
    layout: bytes
    nbytes: list[int]


class AppendRows(SharedRequest, frozen=True, tag="append"):
    """Append rows. Either their `columns` are in the message, which then replaces `AdmitRows` and `Put` too; or the
    rows were admitted by the permit `ticket`, and `ref` refers to their columns. `staged`: the scope in which those
    were staged, if any. `groups`, `keys`: empty for none; the group of a row without one is None. `versions`,
    `lengths`: int64. `spares`: other nodes that have copies of the columns. `admitted`: the id of the `AdmitRows` that
    named shards in `handing`, else 0. `timeout_s`: how long to wait for room, or how long at least to repeat the
    request to the leader. `begin`: for a single row that is still in progress, the token of its producer, the lease in
    seconds, and the column whose tokens are counted. Answered by `RowsAppended`."""

    stream: bytes
    keys: list[str]
    digest: bytes
    groups: list[str | int | None]
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


class ExtendRows(SharedRequest, frozen=True, tag="extend"):
    """Add columns to rows, which are named by number or by key. `holds`: for rows named by number, the number of the
    delivery of each. `piece`: if given, the columns are the next piece of a row in progress. `columns`, `staged`,
    `ref`, `spares`, `timeout_s`: as in `AppendRows`. Answered by `Done`."""

    stream: bytes
    rows: bytes
    holds: bytes
    keys: list[str]
    lengths: dict[str, bytes]
    replace: bool
    timeout_s: float = 0.0
    piece: RowPiece | None = None
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


class TakeLostRows(SharedRequest, frozen=True, tag="take-lost"):
    """Ask for rows that were lost with the nodes that stored them. Each is reported once. Answered by
    `LostRowsTaken`."""

    stream: bytes


class ListStreams(Request, frozen=True, tag="streams"):
    """Ask for the statistics of the first streams by name whose names come after `after` (None: of the first streams).
    `node`: ask only about streams that this member leads. Answered by `Figures`, which is empty after the last
    stream."""

    after: str | None
    node: bytes = b""


class RestoreStream(SharedRequest, frozen=True, tag="restore"):
    """Create a stream from the head of a checkpoint, to be filled by `RestoreRows` and `RestoreColumns`. No other
    client sees it before `PublishRestored`; if this client ends before that, it is dropped. Answered by
    `Opened`."""

    name: str
    head: Head


class RestoreRows(SharedRequest, frozen=True, tag="put-back"):
    """Rows of a stream that is being restored, an encoded `RowsState`. Answered by `Done`."""

    stream: bytes
    block: bytes


class RestoreColumns(SharedRequest, frozen=True, tag="put-columns"):
    """Columns of rows of a stream that is being restored. The rows are named by number. `task`: the task for which the
    producer of the columns had leased the rows, -1 for none. `spares`: as in `AppendRows`. Answered by `Done`."""

    stream: bytes
    staged: str
    ref: bytes
    rows: bytes
    task: int
    spares: list[bytes] = []


class PublishRestored(SharedRequest, frozen=True, tag="restored"):
    """Publish a stream that was restored, since it is complete. Answered by `Done`."""

    stream: bytes


# A client's messages about tables


class AskTable(SharedRequest, frozen=True, tag="ask-table"):
    """A request for the partition of the table `table`, which may wait up to `timeout_s` seconds. `home`: copied
    from the last `TableAnswer`, so that the node notices if the table that the client knew was lost; empty at first.
    `staged`: for a write, as in `AppendRows`. `columns`: for a write, columns in the message, which are written
    together with those of its `ref`. `durable`: if the request creates the table, the table is durable; if there is a
    table that is not durable, the request is refused. The node fills in the client's name. Answered by
    `TableAnswer`."""

    table: str
    home: bytes
    asked: t.FromClient
    timeout_s: float = 0.0
    staged: str = ""
    durable: bool = False
    columns: Inline | None = None


class ListTables(SharedRequest, frozen=True, tag="tables"):
    """Ask for the statistics of tables, as `ListStreams`. Answered by `Figures`."""

    after: str | None


# Messages of a node


class Opened(Reply, frozen=True, tag="opened"):
    """The token of the stream (8 bytes), its settings, and the prefix of the keys that it generates."""

    stream: bytes
    settings: StreamSettings
    mark: str


class RowsAdmitted(Reply, frozen=True, tag="admitted"):
    """The permit. 0: the same append was made before."""

    stream: bytes
    ticket: int


class RowsAppended(Reply, frozen=True, tag="appended"):
    """The number of the first row. `new`: False if the same append was made before."""

    first: int
    new: bool


class StreamAnswer(Reply, frozen=True, tag="stream-answer"):
    """The answer of the partition of a stream."""

    stream: bytes
    result: r.ToClient


class TableAnswer(Reply, frozen=True, tag="table-answer"):
    """The answer of the partition of a table. The client copies `home` into its next `AskTable`."""

    home: bytes
    result: t.ToClient


class LostRowsTaken(Reply, frozen=True, tag="lost-rows"):
    """Key, group and policy version of each lost row, and the tasks that had acked it (bit t for task t). `unnamed`:
    the number of rows of partitions that lost every replica, by the node of their producers, in hex."""

    stream: bytes
    rows: list[tuple[str, str | int | None, int, int]]
    unnamed: dict[str, int] = {}
