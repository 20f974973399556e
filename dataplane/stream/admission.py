"""The limits of a stream, and the permits to append.

A producer gets a permit for a number of rows and bytes before it writes anything. These count against the limits until
the rows are appended or the permit is given back. A refused request waits at the driver of the partition, which tries
it again when rows were removed.

Invariant: with a new permit, the rows and bytes in the stream and of all permits stay within the limits. Extends need
no permit, so that bytes may exceed `max_bytes`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from dataplane.errors import LimitExceeded
from dataplane.stream.settings import StreamSettings

_numbers = itertools.count(1)
"""Numbers of tickets, unique among all `Admission` objects of this process."""


LAG = "max_lag"
"""The only limit at which a waiting append lets later appends pass."""


@dataclass(frozen=True, slots=True)
class AppendSize:
    """The size of an append: its client, rows and bytes, and the newest policy version of its rows."""

    client: str
    rows: int
    nbytes: int
    version: int


@dataclass(frozen=True, slots=True)
class Usage:
    """The rows and bytes in the stream. `oldest`: the oldest policy version with rows left for a task, or None."""

    rows: int
    nbytes: int
    oldest: int | None


class Admission:
    """The permits of one stream. `held()` returns the rows and bytes now in the stream, without permits."""

    def __init__(self, settings: StreamSettings, held: Callable[[], Usage]) -> None:
        self._settings = settings
        self._held = held
        self._tickets: dict[int, AppendSize] = {}
        self._rows = 0
        self._nbytes = 0

    def admit(self, entry: AppendSize) -> int | None:
        """Grant a permit. Returns its ticket; None if a limit would be exceeded now. Raises LimitExceeded if the append
        alone is larger than `max_rows` or `max_bytes`."""
        for what, name, asked, limit in (
            ("rows of a stream", "max_rows", entry.rows, self._settings.max_rows),
            ("bytes of a stream", "max_bytes", entry.nbytes, self._settings.max_bytes),
        ):
            if limit and asked > limit:
                message = f"{asked} {what} in one append, and its {name} is {limit}: append fewer rows, or raise {name}"
                raise LimitExceeded(message, what=what, asked=asked, limit=limit)
        if self.full(entry):
            return None
        ticket = next(_numbers)
        self._tickets[ticket] = entry
        self._rows += entry.rows
        self._nbytes += entry.nbytes
        return ticket

    def full(self, entry: AppendSize) -> str:
        """The name of the limit that the append would exceed; empty if it fits."""
        limits = self._settings
        if limits.max_lag < 0 and not limits.max_rows and not limits.max_bytes:
            return ""
        held = self._held()
        if limits.max_lag >= 0:
            oldest = self.oldest
            if oldest is not None and entry.version - oldest > limits.max_lag:
                return LAG
        if limits.max_rows and held.rows + self._rows + entry.rows > limits.max_rows:
            return "max_rows"
        if limits.max_bytes and held.nbytes + self._nbytes + entry.nbytes > limits.max_bytes:
            return "max_bytes"
        return ""

    @property
    def oldest(self) -> int | None:
        """The oldest policy version with rows left for a task, or with a permit; None if there is none."""
        held = self._held()
        there = () if held.oldest is None else (held.oldest,)
        return min((*there, *(ticket.version for ticket in self._tickets.values())), default=None)

    def ticket(self, number: int) -> AppendSize | None:
        return self._tickets.get(number)

    def clients(self) -> set[str]:
        return {entry.client for entry in self._tickets.values()}

    def coming(self) -> dict[str, int]:
        """The bytes of the unused permits of each client."""
        found: dict[str, int] = {}
        for entry in self._tickets.values():
            found[entry.client] = found.get(entry.client, 0) + entry.nbytes
        return found

    def give_back(self, number: int) -> None:
        """End a permit that was used or is not needed. Idempotent."""
        entry = self._tickets.pop(number, None)
        if entry is not None:
            self._rows -= entry.rows
            self._nbytes -= entry.nbytes

    def leave(self, client: str) -> None:
        """End the permits of a client that has gone."""
        for number in [number for number, entry in self._tickets.items() if entry.client == client]:
            self.give_back(number)

    def end(self) -> None:
        """Release the stream's state: the stream is dropped."""
        self._held = _nothing


def _nothing() -> Usage:
    return Usage(0, 0, None)
