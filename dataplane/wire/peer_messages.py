"""Every message between two nodes. As between a client and its node: typed, validated, never unpickled.

A request carries an `id`, and gets one reply with the same; `Failure` is that of `wire.messages`.
"""

from __future__ import annotations

from dataplane.wire.messages import Done, Failure, Message

MAJOR, MINOR = 1, 0
"""The version that nodes speak among each other. Another major is refused; the lower of two minors is spoken."""

MAX_SHARDS = 4096
"""Shards that one request may name."""

MAX_INLINE, MAX_INLINE_ALL = 64 << 10, 1 << 20
"""Bytes of a shard, and of all in one message, that come with their description: a round trip and a connection less."""


class Greet(Message, frozen=True, tag="greet"):
    """I am here: who I am, and where I listen. Sent again and again, as a sign of life. Answered by `Greeted`."""

    id: int
    major: int
    minor: int
    node: bytes
    address: str
    transports: dict[str, str]


class Describe(Message, frozen=True, tag="describe"):
    """What these shards are. Answered by `Described`."""

    id: int
    shards: list[int]


class Offer(Message, frozen=True, tag="offer"):
    """Leave to read a shard once, by the transport of this name. `node` asks; the shard is `owner`'s, or of who is
    asked. With `whole` all of it will be at `node`, which may be sent elsewhere for it, but not to those in `avoid`.
    With `checks` it reads into memory that nobody sees yet, and so may be given what it has to check itself. Answered
    by `Offered`."""

    id: int
    node: bytes
    shard: int
    transport: str
    timeout_s: float
    owner: bytes = b""
    whole: bool = False
    avoid: list[bytes] = []
    checks: bool = False


class Withdraw(Message, frozen=True, tag="withdraw"):
    """What was offered has been read, or will not be: so many bytes `came`, and with `whole` all of the shard is at
    `node` now. Answered by `Done`."""

    id: int
    node: bytes
    ticket: bytes
    came: int = 0
    whole: bool = False


class FreeParts(Message, frozen=True, tag="free-parts"):
    """Free parts of shards, as `wire.messages.Free` has them. Answered by `Done`."""

    id: int
    parts: list[tuple[int, list[int], tuple[int, int, bytes]]]


PeerRequest = Greet | Describe | Offer | Withdraw | FreeParts


class Greeted(Message, frozen=True, tag="greeted"):
    """So am I; and these addresses are those of members that I know."""

    id: int
    major: int
    minor: int
    node: bytes
    address: str
    transports: dict[str, str]
    known: list[str] = []


class Described(Message, frozen=True, tag="described"):
    """Of each shard asked for: its size, rows, columns, encoded layout, live bits and, if they are few, its bytes."""

    id: int
    shards: list[tuple[int, int, int, bytes, bytes, bytes]]


class Offered(Message, frozen=True, tag="offered"):
    """What the transport takes in exchange for the bytes, once. With `holder` the bytes are to be asked for of that
    node, and the ticket is for `Withdraw` alone. With `chunk` they come from a disk: whole chunks of so many bytes are
    to be read, and compared with their xxh3-64, 8 bytes each in `sums`, little-endian."""

    id: int
    ticket: bytes
    holder: bytes = b""
    chunk: int = 0
    sums: bytes = b""


PeerReply = Greeted | Described | Offered | Done | Failure
