"""What commands mean: the interface between a partition's replicas and a stream or a table.

A leader decides a request into commands; every replica applies the committed ones, in order, once each. `decide` may
read what is volatile (the time, leases of rows) and may refuse; `apply` may not: from equal states, equal commands make
equal states and results everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import msgspec


class Decision(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Commands to commit, none of them empty; the request is answered with the result of the last. If there are none,
    it is answered with `result` at once."""

    commands: tuple[bytes, ...] = ()
    result: bytes = b""


class StateMachine(ABC):
    """One state of one partition. Called by its replica alone, never twice at once."""

    @abstractmethod
    def decide(self, request: bytes, term: int, now: float) -> Decision:
        """What a leader makes of a request. Other commands may be decided, and not applied yet.

        `term` is the epoch in which this leader began: what it hands out (a lease of a row) is good in that term only.
        `now` is by its clock, in seconds, and may be used for what is volatile. Raises DataplaneError to refuse."""

    def serves(self, request: bytes, now: float) -> bool:
        """Whether `decide` would find something for a request that is answered by nothing (b"") where there is nothing
        for it, such as one for rows that are ready. Changes nothing; may be true where it then finds nothing."""
        return True

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
