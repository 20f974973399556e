"""The interface between a partition's replicas and the state machine of a stream or table.

A leader turns a request into commands (`decide`); every replica applies the committed commands in order, each once
(`apply`). `decide` may read volatile state (the time, leases of rows), and may refuse a request. `apply` may do
neither: equal commands applied to equal states must give equal states and results on every replica.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

import msgspec

from dataplane.replication.outbox import LostNodes


class Decision(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Commands to commit, none of them empty. The result of the last command answers the request. Without commands,
    `result` answers the request at once."""

    commands: tuple[bytes, ...] = ()
    result: bytes = b""


class StateMachine(ABC):
    """The state of one partition. Called by its replica only, never concurrently."""

    waits: Callable[[], Iterable[bytes]] = staticmethod(tuple)
    """Returns the requests that wait at the driver. The driver sets this."""

    @abstractmethod
    def decide(self, request: bytes, term: int, now: float) -> Decision:
        """The commands for a request, on the leader. Earlier commands may be decided and not applied yet.

        `term` is the epoch in which this leader began. Leases of rows that it grants are valid in that term only.
        `now` is in seconds of the leader's clock, and may affect volatile state only. Raises DataplaneError to refuse.
        """

    def withdraw(self, request: bytes) -> None:  # noqa: B027 - most machines do not remember decisions
        """Forget the last decision. Its commands will not be committed, and the request is refused."""

    def reads(self, request: bytes) -> bool:
        """Whether `decide` gives no command for the request, so that it can be answered while the disk is full."""
        return False

    def undo(self, request: bytes, result: bytes) -> bytes:
        """The request that gives back the lease, permit or snapshot granted by this result, for a requester that cannot
        be reached. b"" if there is nothing to give back."""
        return b""

    @property
    def version(self) -> int:
        """A number that changes with the state. Time and returned permits do not change it: requests that wait for
        these are tried again at each beat."""
        return 0

    def serves(self, request: bytes, in_vain: int) -> bool:
        """Whether `decide` may serve a waiting request now, such as one for ready rows. Changes nothing. The result
        is only a hint: `decide` may still give nothing (b""). `in_vain`: the `version` at which the request was last
        not served, or -1."""
        return True

    def deadline(self, now: float) -> float:
        """The time, by the leader's clock, at which the leader must execute the request of `tick`. A time up to `now`
        means at once, infinity means never."""
        return math.inf

    def tick(self) -> bytes:
        """The request that applies the passage of time. May be repeated."""
        return b""

    @abstractmethod
    def apply(self, command: bytes) -> bytes:
        """Change the state, and return the result for the requester. Depends on the state and the command only. A
        command whose producer sequence number was applied before changes nothing (see `replication.sessions`)."""

    @abstractmethod
    def snapshot(self) -> bytes:
        """The encoded state: all that `apply` depends on, with producer sequences, without volatile state."""

    @abstractmethod
    def restore(self, state: bytes) -> None:
        """Replace the state by a snapshot; b"" is the state before the first command. Raises Corrupt for anything
        else."""

    @abstractmethod
    def forget(self) -> None:
        """Drop volatile state, since this replica stops or begins to lead."""

    # Clients that may end, and nodes that store columns of the rows. By default there are none. A machine with some
    # understands the requests `EndClients`, `Lose`, `Return` and `OutboxReceived` of `stream.requests`.

    lost_nodes = LostNodes()
    """The lost nodes."""

    def clients(self) -> Iterable[str]:
        """The NODE/LIFE prefixes of the clients' names, without duplicates."""
        return ()

    def holders(self) -> Iterable[str]:
        """The nodes that store columns of the rows and are not lost."""
        return ()

    def waiting(self) -> Iterable[str]:
        """The nodes whose outboxes are not empty."""
        return ()

    def outbox(self, node: str, most: int) -> tuple[tuple[bytes, ...], int]:
        """At most `most` of the oldest entries of a node's outbox, and the number of the last of these."""
        return (), 0
