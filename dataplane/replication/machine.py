"""The interface between a partition's replicas and the state machine of a stream or table.

A leader decides a request into commands; every replica applies the committed ones, in order, each once. `decide` may
read volatile state (the time, leases of rows) and may refuse; `apply` may not: from equal states, equal commands
make equal states and results everywhere.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

import msgspec


class Decision(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Commands to commit, none of them empty; the result of the last answers the request. Without commands, `result`
    answers it at once."""

    commands: tuple[bytes, ...] = ()
    result: bytes = b""


class StateMachine(ABC):
    """The state of one partition. Called by its replica only, never concurrently. `tells`: whether a node is notified
    when a request of it that waited in vain may be served."""

    tells = True

    waits: Callable[[], Iterable[bytes]] = staticmethod(tuple)
    """Returns the requests that wait at the driver. The driver sets this."""

    @abstractmethod
    def decide(self, request: bytes, term: int, now: float) -> Decision:
        """The commands for a request, on the leader. Earlier commands may be decided and not applied yet.

        `term` is the epoch in which this leader began: its grants (leases of rows) are valid in that term only.
        `now`, in seconds of its clock, may be used for volatile state. Raises DataplaneError to refuse.
        """

    def withdraw(self, request: bytes) -> None:  # noqa: B027 - most machines do not remember decisions
        """Forget the last decision: its commands are not committed, and the request is refused."""

    def undo(self, request: bytes, result: bytes) -> bytes:
        """The request that gives the grant of this result back, if its requester cannot be reached; b"" for none."""
        return b""

    def serves(self, request: bytes, now: float) -> bool:
        """Whether `decide` may serve a request that it can also answer by nothing (b""), such as one for ready rows.
        Changes nothing; may be true although `decide` then answers by nothing."""
        return True

    def deadline(self, now: float) -> float:
        """The time, by the leader's clock, at which it must execute the request of `tick`; `now` or earlier for at
        once."""
        return math.inf

    def tick(self) -> bytes:
        """The request that applies the passage of time. May be repeated."""
        return b""

    @abstractmethod
    def apply(self, command: bytes) -> bytes:
        """Change the state, and return the result for the requester. Depends on the state and the command only. Must
        detect a command whose producer sequence was applied before (`sessions`)."""

    @abstractmethod
    def snapshot(self) -> bytes:
        """The encoded state: all that `apply` depends on, with producer sequences, without volatile state."""

    @abstractmethod
    def restore(self, state: bytes) -> None:
        """Replace the state by a snapshot; b"" is the state before the first command. Raises Corrupt for anything
        else."""

    @abstractmethod
    def forget(self) -> None:
        """Drop volatile state: this replica stops or begins to lead."""
