"""Messages about partitions between nodes. All messages that one node sends to another in an iteration of its event
loop share one frame.

A frame has no reply of its own, and may be lost. The sender numbers its requests, and has a deadline for each. The
items of a frame are handled in order; frames of one sender arrive in order too, as long as the connection lasts.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dataplane.replication.messages import AppendEntries, Install
from dataplane.replication.messages import Message as ReplicaMessage
from dataplane.wire.messages import MAX_FRAME, Message

FRAME_BYTES = MAX_FRAME - (256 << 10)
"""The most bytes of the items of one frame, unless its first item is larger."""


class ToReplica(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """A message between two replicas of a partition. `sender`, `to`: their incarnations."""

    partition: str
    sender: int
    to: int
    message: ReplicaMessage


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """A request to the leader of a partition. `wait_s`: if it cannot be served yet, it waits for so long in the queue
    named `queue`. `gives`: the answer has a grant, which is given back if the answer does not arrive; see `Given`.
    Answered by `Answered` or `PartitionRefused`."""

    number: int
    partition: str
    request: bytes
    queue: str = ""
    wait_s: float = 0.0
    gives: bool = False


class Answered(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """The result of a request."""

    number: int
    result: bytes


class PartitionRefused(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The error of a request, in the form of `errors.describe`."""

    number: int
    name: str
    text: str
    fields: dict[str, Any]


class Withdrawn(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """The requester no longer waits for the answer."""

    number: int


class HostReplica(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    """Ask the node to have a replica of a partition; an empty one is created if it has none. Answered by
    `ReplicaHosted` or `PartitionRefused`."""

    number: int
    partition: str


class ReplicaHosted(msgspec.Struct, frozen=True, array_like=True, tag=7, gc=False):
    """The incarnation of the replica."""

    number: int
    incarnation: int


class SettleOutbox(msgspec.Struct, frozen=True, array_like=True, tag=9, gc=False):
    """From the leader of a partition to a node that stores columns of its rows: entries of the node's outbox, which say
    which columns no row needs any more. They are numbered from 1 for each partition and node; `last` is the number of
    the last of these. Answered by `Answered`."""

    number: int
    partition: str
    last: int
    entries: tuple[bytes, ...]


class CountRows(msgspec.Struct, frozen=True, array_like=True, tag=10, gc=False):
    """Count the rows with columns on this node that its producers have appended to a partition whose replicas have all
    died. Answered by `Answered`: a number in ASCII."""

    number: int
    partition: str


class FindReplica(msgspec.Struct, frozen=True, array_like=True, tag=11, gc=False):
    """Ask for the node's replica of a partition. Answered by `ReplicaHosted`, with 0 if it has none."""

    number: int
    partition: str


class Given(msgspec.Struct, frozen=True, array_like=True, tag=12, gc=False):
    """The numbers of requests whose answers had grants that can be given back. Answered by `Received`."""

    numbers: tuple[int, ...]


class Received(msgspec.Struct, frozen=True, array_like=True, tag=13, gc=False):
    """Which of these answers have arrived, and which have not arrived and are no longer waited for."""

    numbers: tuple[int, ...]
    missing: tuple[int, ...]


Item = (
    ToReplica
    | Ask
    | Answered
    | PartitionRefused
    | Withdrawn
    | HostReplica
    | ReplicaHosted
    | SettleOutbox
    | CountRows
    | FindReplica
    | Given
    | Received
)


def is_request(item: Item) -> bool:
    """Whether another message answers this one."""
    if isinstance(item, ToReplica):
        return isinstance(item.message, AppendEntries | Install)
    return isinstance(item, Ask | HostReplica | SettleOutbox | CountRows | FindReplica | Given)


class PartitionFrame(Message, frozen=True, tag="partitions"):
    """A frame from the process `life` of `node`."""

    node: str
    life: int
    items: list[Item]


class _Packed(Message, frozen=True, tag="partitions"):
    """A frame with encoded items."""

    node: str
    life: int
    items: list[msgspec.Raw]


encode_item = msgspec.msgpack.Encoder().encode
_encode = msgspec.msgpack.Encoder().encode


def pack(node: str, life: int, items: list[bytes]) -> bytes:
    """A frame of encoded items."""
    return _encode(_Packed(node, life, [msgspec.Raw(item) for item in items]))
