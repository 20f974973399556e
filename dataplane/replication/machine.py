"""What commands mean: the interface between a partition's replicas and a stream or a table.

A leader decides a request into commands; every replica applies the committed ones, in order, once each. `decide` may
read what is volatile (the time, leases of rows) and may refuse; `apply` may not: from equal states, equal commands make
equal states and results everywhere.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

import msgspec


class Decision(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Commands to commit, none of them empty; the request is answered with the result of the last. If there are none,
    it is answered with `result` at once."""

    commands: tuple[bytes, ...] = ()
    result: bytes = b""


class StateMachine(ABC):
    """One state of one partition. Called by its replica alone, never twice at once. `tells`: whether a node whose
    request waited in vain is to be told when there is something for it."""

    tells = True

    waits: Callable[[], Iterable[bytes]] = staticmethod(tuple)
    """The requests that wait at the driver until there is something for them; the driver's to set."""

    @abstractmethod
    def decide(self, request: bytes, term: int, now: float) -> Decision:
        """What a leader makes of a request. Other commands may be decided, and not applied yet.

        `term` is the epoch in which this leader began: what it hands out (a lease of a row) is good in that term only.
        `now` is by its clock, in seconds, and may be used for what is volatile. Raises DataplaneError to refuse."""

    def withdraw(self, request: bytes) -> None:  # noqa: B027 - most remember nothing of what they decided
        """The commands that were just decided for this request are not committed: it is refused."""

    def undo(self, request: bytes, result: bytes) -> bytes:
        """The request that takes back what this result gives to an asker who cannot be told; b"" for nothing."""
        return b""

    def serves(self, request: bytes, now: float) -> bool:
        """Whether `decide` would find something for a request that is answered by nothing (b"") where there is nothing
        for it, such as one for rows that are ready. Changes nothing; may be true where it then finds nothing."""
        return True

    def deadline(self, now: float) -> float:
        """When the leader is to be asked what `tick` gives, by its clock: `now` or earlier for at once."""
        return math.inf

    def tick(self) -> bytes:
        """The request by which time passes. May be repeated."""
        return b""

    @abstractmethod
    def apply(self, command: bytes) -> bytes:
        """Change the state; return the result for who asked. Depends on the state and the command alone. Has to
        recognise by itself a command whose producer sequence was applied before (`sessions`)."""

    @abstractmethod
    def snapshot(self) -> bytes:
        """All that `apply` depends on: the table of producer sequences too, and nothing that is volatile."""

    @abstractmethod
    def restore(self, state: bytes) -> None:
        """Take the place of the state by what `snapshot` gave; b"" is the state before the first command. Raises
        Corrupt for anything else."""

    @abstractmethod
    def forget(self) -> None:
        """Drop what is volatile: this replica leads no more, or begins to."""
