"""The messages between a client and its node: the base classes, and those about the connection and the node itself.

A message is one MessagePack array that begins with its tag. A request has an `id` chosen by the client, and gets
exactly one reply with the same `id`, even if it was cancelled. A message without an `id` gets no reply. A receiver
ignores fields that a later minor version appended.

File descriptors are sent as ancillary data of a message: one for each `SegmentGrant` in it, in order. `shard_messages`
and `row_messages` define the other messages, and `client_messages` decodes all.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MAJOR, MINOR = 5, 0
"""Version of the protocol. Another major version is refused; of two minor versions the lower is used."""

MAX_FRAME = 4 << 20
"""Bytes of the largest message."""

MAX_WAITING = 1024
"""The most requests of one client that may wait in a node at the same time."""

MAX_WAITING_BYTES = 32 << 20
"""The most bytes, approximately, of the waiting requests of one client."""


class Message(msgspec.Struct, frozen=True, array_like=True):
    """Base class of all messages."""


# Messages of a client


class FromClient(Message, frozen=True):
    """Base class of the messages of a client."""


class Request(FromClient, frozen=True):
    """Base class of messages to which the node replies, with the same `id`."""

    id: int


class SharedRequest(Request, frozen=True):
    """Base class of requests that other nodes of a cluster may have to answer."""


class Hello(Request, frozen=True, tag="hello"):
    """The first message of a connection. `label` names the client in `Backpressure` and statistics. `writes`:
    whether the client may write; only then it is granted memory to prewarm. Answered by `Welcome`."""

    major: int
    minor: int
    label: str
    writes: bool


class ReadStats(Request, frozen=True, tag="stats"):
    """Ask for statistics. `about`: "node", the statistics of the member `node`, or of this node if that is empty;
    "members", the members of the cluster; "metrics", the metrics of this node; "graphs", the performance graphs of the
    clients of the member `node`, with the causes of their waits. Answered by `Figures`."""

    node: bytes = b""
    about: Literal["node", "members", "metrics", "graphs"] = "node"


class ReadClock(Request, frozen=True, tag="read-clock"):
    """Ask for the monotonic clock of the node `node`, or of the node that receives this if that is empty. Answered by
    `ClockRead`."""

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


class Disconnect(FromClient, frozen=True, tag="leave"):
    """The client is about to disconnect: its waiting requests are cancelled, and its leases, permits and staged shards
    are released. Its pins end with the connection."""


class Alive(FromClient, frozen=True, tag="alive"):
    """A heartbeat, sent while the client holds reservations."""


MAX_REPORT = 128 << 10
"""Bytes of the largest performance graph of a client."""


class Report(FromClient, frozen=True, tag="report"):
    """The performance graph of the client since its start (`diagnosis.recorder`); it replaces the previous one. Sent if
    `Welcome` asks for it. Not answered."""

    graph: bytes


# Messages of a node


class Reply(Message, frozen=True):
    """Base class of the messages of a node. `id`: of the request that it answers, or 0."""

    id: int


class SegmentGrant(Message, frozen=True):
    """A segment whose descriptor comes with this message: its number, its size in bytes, and whether the client may
    write to it."""

    segment: int
    size: int
    writable: bool


class Welcome(Reply, frozen=True, tag="welcome"):
    """The answer to `Hello`. `prewarm`: the number of bytes at the start of the granted segment that the client
    populates.
    `token`: identifies this client to a forked process that inherits its pins. `shared_s`: seconds that the answer to a
    request about streams or tables (`SharedRequest`) may take in addition to the request's timeout: in a cluster, the
    time of a failover. `ring`: the size in bytes of the ring to which the client records its events; its descriptor
    comes after those of the segments; 0 for no ring. `reports_s`: the interval at which the client is to send a
    `Report`; 0 for never. `holds`: the bytes of rows for which this node has room, in memory and on disk; 0 if other
    nodes have room for rows too."""

    major: int
    minor: int
    node: bytes
    capacity: int
    lease_s: float
    grants: list[SegmentGrant]
    prewarm: int
    token: bytes = b""
    shared_s: float = 5.0
    ring: int = 0
    reports_s: float = 0.0
    holds: int = 0


class Done(Reply, frozen=True, tag="done"):
    """Success."""


class Figures(Reply, frozen=True, tag="figures"):
    """Statistics, as plain values by name."""

    values: dict[str, Any]


class ClockRead(Reply, frozen=True, tag="clock-read"):
    """Nanoseconds of a node's monotonic clock. `ahead`: if that is not the node that answers, the nanoseconds by which
    its clock is ahead of the answering node's; `error`: the uncertainty of that."""

    now: int
    ahead: int = 0
    error: int = 0


class RingList(Reply, frozen=True, tag="ring-list"):
    """For each ring: its number; the id of its process, the name of that, and whether it is alive; and the place,
    number and name of each thread."""

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
