"""Messages of partitions between nodes: everything that one node has for another in a step of its event loop is one
frame.

A frame is posted: it has no reply of its own, and may be lost. The sender numbers its questions, and has a deadline.
The items of a frame are handled in order; frames of one sender arrive in order too, as long as a connection lasts.
"""

from __future__ import annotations

from typing import Any

import msgspec

from dataplane.replication.messages import Message as ReplicaMessage
from dataplane.wire.messages import MAX_FRAME, Message

FRAME_BYTES = MAX_FRAME - (256 << 10)
"""Bytes of the items of one frame, unless its first is larger by itself."""


class Replicate(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """A message between two replicas of a partition. `sender`, `to`: their incarnations."""

    partition: str
    sender: int
    to: int
    message: ReplicaMessage


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    """A request to the leader of a partition. With `wait_s`, a request without a result waits in a queue with this
    name, for so long, until there is one. Answered by `Answered` or `Refused`. `gives`: the answer's grant is given
    back unless the answer arrives; see `Given`."""

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


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The error of a request, in the form of `errors.describe`."""

    number: int
    name: str
    text: str
    fields: dict[str, Any]


class Withdrawn(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    """The requester does not wait for the answer any more."""

    number: int


class Host(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    """Host a replica of a partition; an empty one is created if needed. Answered by `Hosted` or `Refused`."""

    number: int
    partition: str


class Hosted(msgspec.Struct, frozen=True, array_like=True, tag=7, gc=False):
    """The incarnation of the replica."""

    number: int
    incarnation: int


class Settle(msgspec.Struct, frozen=True, array_like=True, tag=9, gc=False):
    """From the leader of a partition, for the node that keeps its shards: outbox entries of the partition's state
    machine, which report the outcome of rows. They are numbered, for each partition and node, from 1 on; `last` is the
    number of the last of these. Answered by `Answered`."""

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
    """Ask for the node's replica of a partition. Answered by `Hosted`, with 0 if it has none."""

    number: int
    partition: str


class Given(msgspec.Struct, frozen=True, array_like=True, tag=12, gc=False):
    """Questions whose answers grant something that can be given back. Answered by `Received`."""

    numbers: tuple[int, ...]


class Received(msgspec.Struct, frozen=True, array_like=True, tag=13, gc=False):
    """The answers that have arrived, and those that have not and are no longer waited for."""

    numbers: tuple[int, ...]
    missing: tuple[int, ...]


Item = (
    Replicate
    | Ask
    | Answered
    | Refused
    | Withdrawn
    | Host
    | Hosted
    | Settle
    | CountRows
    | FindReplica
    | Given
    | Received
)


class Frame(Message, frozen=True, tag="partitions"):
    """From the process `life` of `node`, to `to`; another node drops it."""

    node: str
    life: int
    to: str
    items: list[Item]


class _Packed(Message, frozen=True, tag="partitions"):
    """A frame with encoded items."""

    node: str
    life: int
    to: str
    items: list[msgspec.Raw]


encode_item = msgspec.msgpack.Encoder().encode
_encode = msgspec.msgpack.Encoder().encode


def pack(node: str, life: int, to: str, items: list[bytes]) -> bytes:
    """A frame of encoded items."""
    return _encode(_Packed(node, life, to, [msgspec.Raw(item) for item in items]))
