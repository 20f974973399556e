"""Effects: the actions that a replica requests of its driver, to be executed in the given order.

The protocol is correct even if effects fail: a message may be lost, delayed or duplicated, and a compare-and-set may
take effect without an answer. Only the order of `StoreOperation` effects matters: after a crash the disk must have the
result of a prefix of the operations.
"""

from __future__ import annotations

import msgspec

from dataplane.errors import DataplaneError
from dataplane.replication.configuration import Configuration, ReplicaId
from dataplane.replication.log import Operation
from dataplane.replication.messages import Message


class Send(msgspec.Struct, frozen=True):
    """Send a message to this incarnation of a replica, if it can be reached."""

    to: ReplicaId
    message: Message


class SendAnswer(msgspec.Struct, frozen=True):
    """Answer a request."""

    request: int
    result: bytes


class Refuse(msgspec.Struct, frozen=True):
    """Answer a request with an error."""

    request: int
    error: DataplaneError


class Swap(msgspec.Struct, frozen=True):
    """Compare-and-set the partition's configuration. Then pass the coordinator's value to the replica (`configured`),
    or the lack of one (`forgotten`). `expected` None: the coordinator must have no configuration."""

    expected: Configuration | None
    wanted: Configuration


class StoreOperation(msgspec.Struct, frozen=True):
    """Write an operation of the log to disk, and call `stored(ticket)` once it and all earlier ones are durable."""

    ticket: int
    operation: Operation


Effect = Send | SendAnswer | Refuse | Swap | StoreOperation
