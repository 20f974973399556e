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
    """Commands to commit, none of them empty; the request is answered with the result of the last. Without commands
    it is answered with `result` at once."""

    commands: tuple[bytes, ...] = ()
    result: bytes = b""


class StateMachine(ABC):
    """The state of one partition. Called by its replica only, never concurrently. `tells`: whether a node whose
    request waited in vain is to be told when there is something for it."""

    tells = True

    waits: Callable[[], Iterable[bytes]] = staticmethod(tuple)
    """The requests that wait at the driver until there is something for them; the driver's to set."""

    @abstractmethod
    def decide(self, request: bytes, term: int, now: float) -> Decision:
        """The commands for a request, on the leader. Earlier commands may be decided and not applied yet.

        `term` is the epoch in which this leader began: what it grants (a lease of a row) is valid in that term only.
        `now`, in seconds of its clock, may be used for volatile state. Raises DataplaneError to refuse.
        """

    def withdraw(self, request: bytes) -> None:  # noqa: B027 - most remember nothing of what they decided
        """The commands that were just decided for this request are not committed: it is refused."""

    def undo(self, request: bytes, result: bytes) -> bytes:
        """The request that returns what this result grants, for a requester that cannot be reached; b"" for none."""
        return b""

    def serves(self, request: bytes, now: float) -> bool:
        """Whether `decide` would find something for a request that is otherwise answered by nothing (b""), such as
        one for ready rows. Changes nothing; may be true although nothing is found then."""
        return True

    def deadline(self, now: float) -> float:
        """When the leader is to execute the request of `tick`, by its clock: `now` or earlier for at once."""
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
        """Everything that `apply` depends on, with the table of producer sequences, without volatile state."""

    @abstractmethod
    def restore(self, state: bytes) -> None:
        """Replace the state by a snapshot; b"" is the state before the first command. Raises Corrupt for anything
        else."""

    @abstractmethod
    def forget(self) -> None:
        """Drop volatile state: this replica stops or begins to lead."""
