"""The messages between a client and its node: the base classes, and those about the connection and the node itself.

A message is one MessagePack array that begins with its tag. A request carries an `id` chosen by the client and gets
exactly one reply with the same `id`, also if it was cancelled. A message without an `id` gets no reply. A receiver
ignores fields that a later minor version appended.

File descriptors travel beside a message: one for each `Grant` in it, in order. `shard_messages` and `row_messages`
define the others, and `client_messages` decodes all.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

MAJOR, MINOR = 3, 0
"""Version of the protocol. Another major version is refused; of two minor versions the lower is spoken."""

MAX_FRAME = 4 << 20
"""Bytes of the largest message."""

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


class Stats(Request, frozen=True, tag="stats"):
    """Ask for the statistics of this node, or of the member `node`; or about the members of the cluster, the metrics of
    this node, or the performance graphs of the clients of all nodes, with the causes of their waits. Answered by
    `Figures`."""

    node: bytes = b""
    about: Literal["node", "members", "metrics", "graphs"] = "node"


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
