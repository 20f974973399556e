"""What a replica wants of its driver, to be carried out in the order given.

None of them has to succeed. A message may be lost, come late or twice; a compare-and-set may happen without an answer.
Only `Store` has an order that matters: what is on disk after a crash is what the first so many operations made.
"""

from __future__ import annotations

import msgspec

from dataplane.errors import DataplaneError
from dataplane.replication.configuration import Configuration, ReplicaId
from dataplane.replication.messages import Message
from dataplane.replication.storage import Operation


class Send(msgspec.Struct, frozen=True):
    """Send a message to a replica, if that incarnation of it can be reached."""

    to: ReplicaId
    message: Message


class Answer(msgspec.Struct, frozen=True):
    """Answer a request."""

    request: int
    result: bytes


class Refuse(msgspec.Struct, frozen=True):
    """Answer a request with an error."""

    request: int
    error: DataplaneError


class Swap(msgspec.Struct, frozen=True):
    """Compare-and-set the partition's configuration (`expected` None: there is none); tell the replica what the value
    is afterwards (`configured`, `forgotten`)."""

    expected: Configuration | None
    wanted: Configuration


class Store(msgspec.Struct, frozen=True):
    """Put an operation of the log on disk, and call `stored(ticket)` once it and all before it are."""

    ticket: int
    operation: Operation


Effect = Send | Answer | Refuse | Swap | Store
