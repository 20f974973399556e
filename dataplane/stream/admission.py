"""Who may append, and when: the limits of a stream.

A producer is admitted before it writes anything, with a ticket for so many rows and bytes; they count from then on,
until they come or the ticket is given back. Who is not admitted may wait (`waiters`), and asks again.

What always holds: rows and bytes in the stream and admitted to it never pass a limit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from dataplane.errors import LimitExceeded
from dataplane.stream.settings import Settings

_numbers = itertools.count(1)
"""Of tickets: of no two streams the same, nor of what keeps a stream's limits now and what did before."""


LET_IN = -1
"""In place of a ticket: of rows of a stream of one node, which were found to fit in the same moment."""

LAG = "max_lag"
"""The limit that older rows do not wait for."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a client asks leave to append."""

    client: str
    rows: int
    nbytes: int
    version: int


@dataclass(frozen=True, slots=True)
class Held:
    """What the stream holds. `oldest`: the first policy version that a task has rows of to do, None for none."""

    rows: int
    nbytes: int
    oldest: int | None


class Admission:
    """The tickets of one stream, of which `held()` tells what is in it."""

    def __init__(self, settings: Settings, held: Callable[[], Held]) -> None:
        self._settings = settings
        self._held = held
        self._tickets: dict[int, Entry] = {}
        self._rows = 0
        self._nbytes = 0

    def configure(self, settings: Settings) -> None:
        """The limits are these from now on."""
        self._settings = settings

    def admit(self, entry: Entry) -> int | None:
        """A ticket; None where a limit is in the way now. Raises LimitExceeded where one always will be."""
        for what, asked, limit in (
            ("rows of a stream", entry.rows, self._settings.max_rows),
            ("bytes of a stream", entry.nbytes, self._settings.max_bytes),
        ):
            if limit and asked > limit:
                raise LimitExceeded(
                    f"an append of {asked} {what} can never fit its {limit}", what=what, asked=asked, limit=limit
                )
        if self.full(entry):
            return None
        ticket = next(_numbers)
        self._tickets[ticket] = entry
        self._rows += entry.rows
        self._nbytes += entry.nbytes
        return ticket

    def full(self, entry: Entry) -> str:
        """Which limit the entry would pass; empty for none."""
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
        """The oldest policy version that a task has rows of to do, or that was admitted; None for none."""
        held = self._held()
        there = () if held.oldest is None else (held.oldest,)
        return min((*there, *(ticket.version for ticket in self._tickets.values())), default=None)

    def ticket(self, number: int) -> Entry | None:
        """Who was admitted with this ticket, and has not come."""
        return self._tickets.get(number)

    def clients(self) -> set[str]:
        """Those that were admitted and have not come."""
        return {entry.client for entry in self._tickets.values()}

    def coming(self) -> dict[str, int]:
        """How many bytes each client was admitted to bring and has not brought."""
        found: dict[str, int] = {}
        for entry in self._tickets.values():
            found[entry.client] = found.get(entry.client, 0) + entry.nbytes
        return found

    def give_back(self, number: int) -> None:
        """What was admitted has come, or does not. Idempotent."""
        entry = self._tickets.pop(number, None)
        if entry is not None:
            self._rows -= entry.rows
            self._nbytes -= entry.nbytes

    def leave(self, client: str) -> None:
        """The client has gone: what it was admitted to bring does not come."""
        for number in [number for number, entry in self._tickets.items() if entry.client == client]:
            self.give_back(number)

    def end(self) -> None:
        """The stream is no more, and holds nothing."""
        self._held = _nothing


def _nothing() -> Held:
    return Held(0, 0, None)
