"""Every message between two nodes. As between a client and its node: typed, validated, never unpickled.

A request carries an `id`, and gets one reply with the same; `Failure` is that of `wire.messages`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from dataplane.stream.block import Block
from dataplane.stream.settings import Settings
from dataplane.wire.messages import Done, Failure, Message, Selection
from dataplane.wire.partition_messages import Frame

MAJOR, MINOR = 1, 0
"""The version that nodes speak among each other. Another major is refused; the lower of two minors is spoken."""

MAX_SHARDS = 4096
"""Shards that one request may name."""

MAX_INLINE, MAX_INLINE_ALL = 64 << 10, 1 << 20
"""Bytes of a shard, and of all in one message, that come with their description: a round trip and a connection less."""

Identity = Annotated[bytes, msgspec.Meta(max_length=16)]
"""Of a node, or of its part of a stream or table: bytes that are drawn by chance. What is longer is no message, so that
what a node remembers of others is bounded where their number is."""


class Fenced(Message, frozen=True):
    """A message from `node`, which has begun with `since`, to one that it knows to have begun with `told`: not heard
    once either has begun anew, or the other was taken for dead. All of that is filled in as it is sent."""

    id: int
    node: Identity = b""
    since: int = 0
    told: int = 0


class Greet(Message, frozen=True, tag="greet"):
    """I am here: who I am, and where I listen. Sent again and again, as a sign of life. Answered by `Greeted`."""

    id: int
    major: int
    minor: int
    node: Identity
    address: str
    transports: dict[str, str]


class Describe(Message, frozen=True, tag="describe"):
    """What these shards are. Answered by `Described`. `apart`: the live bits of large shards are not told in the
    answer, but asked for by `LiveRows`."""

    id: int
    shards: list[int]
    apart: bool = False


class LiveRows(Message, frozen=True, tag="live-rows"):
    """Which rows of a column of a shard still count, as the message of this name between a node and its clients.
    Answered by `LiveBits`."""

    id: int
    shard: int
    column: int
    first: int
    count: int


class Offer(Message, frozen=True, tag="offer"):
    """Leave to read a shard once, by the transport of this name. `node` asks; the shard is `owner`'s, or of who is
    asked. With `whole` all of it will be at `node`, which may be sent elsewhere for it, but not to those in `avoid`.
    With `checks` it reads into memory that nobody sees yet, and so may be given what it has to check itself. Answered
    by `Offered`."""

    id: int
    node: Identity
    shard: int
    transport: str
    timeout_s: float
    owner: Identity = b""
    whole: bool = False
    avoid: list[Identity] = []
    checks: bool = False


class Withdraw(Message, frozen=True, tag="withdraw"):
    """What was offered has been read, or will not be: so many bytes `came`, and with `whole` all of the shard is at
    `node` now. Answered by `Done`."""

    id: int
    node: Identity
    ticket: bytes
    came: int = 0
    whole: bool = False


class RetainParts(Message, frozen=True, tag="retain-parts"):
    """Make links to parts of shards of yours, as `wire.messages.Retain` has it. Answered by `Linked`."""

    id: int
    shards: list[tuple[int, Selection]]


class FreeParts(Message, frozen=True, tag="free-parts"):
    """Free parts of shards, as `wire.messages.Free` has them; without columns, all that the number names. Answered by
    `PartsFreed`."""

    id: int
    parts: list[tuple[int, list[int], tuple[int, int, bytes]]]


class Ask(Fenced, frozen=True, kw_only=True, tag="ask"):
    """What a client of the node `node` asks of a stream: an encoded request of `wire.messages`. `number` is the asker's
    for it: asked again under the same, since the answer did not come, it is done once. `answered`: the numbers of
    requests whose answers have come, and can be forgotten. Answered by `Answer`, or by `Waits`."""

    client: int
    number: int
    answered: list[int]
    request: bytes


class NotAsked(Message, frozen=True, tag="not-asked"):
    """Nobody waits any more for the answer to this. Answered by `Done`."""

    id: int
    node: Identity
    number: int


class ClientGone(Message, frozen=True, tag="client-gone"):
    """This client of that node has gone. Answered by `Done`."""

    id: int
    node: Identity
    client: int


class OpenPart(Message, frozen=True, tag="open-part"):
    """Have a part of the stream of this name. Without settings: if there is such a stream. `generation`: how many times
    the name was used; 0 for the present one. Answered by `Part`."""

    id: int
    name: str
    settings: Settings | None
    generation: int
    closed: bool


class DropStream(Message, frozen=True, tag="drop-stream"):
    """The stream of this name was dropped, in this generation. Answered by `Done`."""

    id: int
    name: str
    generation: int


class Locate(Message, frozen=True, tag="locate"):
    """Which stream has a part of this token here. Answered by `Located`."""

    id: int
    token: Identity


class Settled(Fenced, frozen=True, kw_only=True, tag="settled"):
    """What has become of rows, to a node that columns of them are stored on: of which part (its token) they are, the
    task that is done with them, the rows (int64), and the state; task -1: they are gone; -2: they have moved, and the
    part has let go of them; and which other nodes store columns of which of them. Answered by `Done`."""

    settled: list[tuple[Identity, int, bytes, int, list[tuple[Identity, bytes]]]]


class Announce(Fenced, frozen=True, kw_only=True, tag="announce"):
    """Rows whose home, the part of this token, has died, to their home now; with columns: which rows, for which task
    they were held by who brought them, a reference, and lengths as in `Append`. `holders`: nodes that have the columns
    too, or tell of the rows. `moved`: their home lives, but this is theirs now; the nodes that hold the columns are to
    be told. `others`: nodes that are known to have stored columns of rows, and which; without these columns a row is
    lost, or where it `moved`, they were replaced. Answered by `Announced`."""

    name: str
    settings: Settings
    generation: int
    token: Identity
    block: Block
    columns: list[tuple[bytes, int, bytes, dict[str, bytes]]]
    holders: list[Identity] = []
    moved: bool = False
    others: list[tuple[Identity, bytes]] = []


class Moved(Fenced, frozen=True, kw_only=True, tag="moved"):
    """Rows of the part `token`, to a node that columns of them are stored on: they are rows of `part` now, under these
    numbers. `node` is that of the part, which tells it. Answered by `Done`."""

    token: Identity
    were: bytes
    part: Identity
    whole: Identity
    mark: str
    rows: bytes


class Unmoved(Fenced, frozen=True, kw_only=True, tag="unmoved"):
    """Rows of the part `token` were about to move to the part `to`, whose node had begun with `began` and has died:
    they are at their old home again, which tells it. Answered by `Returned`."""

    token: Identity
    to: Identity
    began: int
    rows: bytes


class Still(Fenced, frozen=True, kw_only=True, tag="still"):
    """As far as this node knows, to whom these nodes are members (a digest of all), no row here has its home elsewhere.
    Answered by `Done`."""

    members: bytes


class Hold(Fenced, frozen=True, kw_only=True, tag="hold"):
    """Keep what you store of these references, for the node `node` and under its number; more may come under the same.
    `part`: the one reference is of columns of a stream's rows, whose numbers are told by `HeldAs`: the stream's name,
    settings and generation, and the part's node, token, token of the whole, and mark. Answered by `Done`."""

    number: int
    refs: list[bytes]
    part: tuple[str, Settings, int, Identity, Identity, Identity, str] | None


class HeldAs(Message, frozen=True, tag="held-as"):
    """What was held are the columns that this `Append` (whose first row got this number) or `Extend` of
    `wire.messages` has brought. Answered by `Done`."""

    id: int
    node: Identity
    number: int
    first: int
    request: bytes


class LetGo(Message, frozen=True, tag="let-go"):
    """What was held under this number is not needed. Answered by `Done`."""

    id: int
    node: Identity
    number: int


class TakeReplicas(Message, frozen=True, tag="take-replicas"):
    """Keep these shards of the node `node` too. Answered by `Done`, when they are there."""

    id: int
    node: Identity
    shards: list[int]
    timeout_s: float


class RetainReplicas(Message, frozen=True, tag="retain-replicas"):
    """These links were made to parts of shards of the node `node`, of which you keep replicas. Answered by `Done`."""

    id: int
    node: Identity
    links: list[tuple[int, Selection]]


class FreeReplicas(Message, frozen=True, tag="free-replicas"):
    """Parts of shards of the node `node` were freed, as in `FreeParts`; without columns, all of a shard. Answered by
    `Done`."""

    id: int
    node: Identity
    parts: list[tuple[int, list[int], tuple[int, int, bytes]]]


class FindReplicas(Message, frozen=True, tag="find-replicas"):
    """Which of these shards of the node `node` are kept here. Answered by `FoundReplicas`."""

    id: int
    node: Identity
    shards: list[int]


class Holds(Fenced, frozen=True, kw_only=True, tag="holds"):
    """What a node's part of a stream holds, at which of its changes: rows, bytes, the oldest policy version that a task
    has to do, and the tasks it waits for; and a digest of the members, as in `Still`. Rows that it is about to announce
    to a new home are among them, and those that its clients were let in with by who kept the limits before. Answered by
    `Done`."""

    name: str
    generation: int
    changes: int
    rows: int
    nbytes: int
    oldest: int | None
    behind: list[str]
    members: bytes = b""


class AnnounceColumns(Fenced, frozen=True, kw_only=True, tag="announce-columns"):
    """More columns of such rows, wherever they have come to; `holders` as in `Announce`. Answered by `Announced`."""

    name: str
    token: Identity
    columns: list[tuple[bytes, int, bytes, dict[str, bytes]]]
    holders: list[Identity] = []


class FindTable(Message, frozen=True, tag="find-table"):
    """Whether the table of this name is here. `node` asks; two who are about to make it find that it is at the one
    with the greater number. Answered by `FoundTable`."""

    id: int
    node: Identity
    name: str


class KeepRows(Message, frozen=True, tag="keep-rows"):
    """Keep what you store of this reference for a table whose home is `home`, until that says that it is not needed;
    `node` asks, and `number` is its number for it. Answered by `Done`."""

    id: int
    home: Identity
    node: Identity
    number: int
    ref: bytes


class LetGoRows(Message, frozen=True, tag="let-go-rows"):
    """What was to be kept so has not come into the table. Answered by `Done`."""

    id: int
    home: Identity
    node: Identity
    number: int


class ThinRows(Message, frozen=True, tag="thin-rows"):
    """Cells that were kept for tables whose home is `home` are not needed any more: who asked for it and under which
    number, which columns of which rows (int64), and whether that is the last of it. Answered by `Done`."""

    id: int
    home: Identity
    over: list[tuple[Identity, int, list[str], bytes, bool]]


PeerRequest = (
    Greet
    | Describe
    | LiveRows
    | Offer
    | Withdraw
    | RetainParts
    | FreeParts
    | Ask
    | NotAsked
    | ClientGone
    | OpenPart
    | DropStream
    | Locate
    | Settled
    | Announce
    | AnnounceColumns
    | Holds
    | Moved
    | Unmoved
    | Still
    | Hold
    | HeldAs
    | LetGo
    | TakeReplicas
    | RetainReplicas
    | FreeReplicas
    | FindReplicas
    | FindTable
    | KeepRows
    | LetGoRows
    | ThinRows
    | Frame
)


class Greeted(Message, frozen=True, tag="greeted"):
    """So am I; and these addresses are those of members that I know. `since`: as `Member.since` of me; `fallen`: that
    of who asks when I took it for dead, -1 if I did not; `members`: how many have answered me lately, and I."""

    id: int
    major: int
    minor: int
    node: Identity
    address: str
    transports: dict[str, str]
    known: list[str] = []
    since: int = 0
    fallen: int = -1
    members: int = 1


class Described(Message, frozen=True, tag="described"):
    """Of each shard asked for: its size, rows, columns, encoded layout, live bits and, if they are few, its bytes.
    `apart`: the numbers of those whose live bits are to be asked for."""

    id: int
    shards: list[tuple[int, int, int, bytes, bytes, bytes]]
    apart: list[int] = []


class Linked(Message, frozen=True, tag="linked"):
    """The links that were made, in the order of the request."""

    id: int
    links: list[int]


class PartsFreed(Message, frozen=True, tag="parts-freed"):
    """They are freed, and of these shards others own some of it still."""

    id: int
    owned: list[int]


class LiveBits(Message, frozen=True, tag="live-bits"):
    """One bit a row that was asked for, 1 for one that counts; empty where all do."""

    id: int
    bits: bytes


class Offered(Message, frozen=True, tag="offered"):
    """What the transport takes in exchange for the bytes, once. With `holder` the bytes are to be asked for of that
    node, and the ticket is for `Withdraw` alone. With `chunk` they come from a disk: whole chunks of so many bytes are
    to be read, and compared with their xxh3-64, 8 bytes each in `sums`, little-endian."""

    id: int
    ticket: bytes
    holder: Identity = b""
    chunk: int = 0
    sums: bytes = b""


class Answer(Message, frozen=True, tag="answer"):
    """An encoded reply of `wire.messages`."""

    id: int
    reply: bytes


class Waits(Message, frozen=True, tag="waits"):
    """There is no answer yet: ask again under the same number. `busy`: not at once, since many wait."""

    id: int
    busy: bool


class Part(Message, frozen=True, tag="part"):
    """The part of a stream that is here: its token, that by which the whole stream is asked for here, and its mark."""

    id: int
    token: Identity
    whole: Identity
    mark: str
    settings: Settings
    generation: int
    closed: bool


class Located(Message, frozen=True, tag="located"):
    """The name of a stream; empty for none."""

    id: int
    name: str


class FoundReplicas(Message, frozen=True, tag="found-replicas"):
    """The numbers that they have here, 0 for those that are not."""

    id: int
    numbers: list[int]


class Announced(Message, frozen=True, tag="announced"):
    """Which of the rows have come, by their numbers before and by their numbers now, int64."""

    id: int
    were: bytes
    rows: bytes


class Returned(Message, frozen=True, tag="returned"):
    """What was done of rows where they were meanwhile: a task, the rows (int64), and the state."""

    id: int
    done: list[tuple[int, bytes, int]]


class FoundTable(Message, frozen=True, tag="found-table"):
    """Whether it is here."""

    id: int
    there: bool


PeerReply = (
    Greeted
    | Described
    | LiveBits
    | Offered
    | Linked
    | PartsFreed
    | Done
    | Failure
    | Answer
    | Waits
    | Part
    | Located
    | Announced
    | Returned
    | FoundReplicas
    | FoundTable
)
