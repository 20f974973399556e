"""Who may append, and when: the limits of a stream, and the producers that wait for them.

A producer is admitted before it writes anything, with a ticket for so many rows and bytes; they count from then on,
until they come or the ticket is given back. What waits is let in in turn, but for those that `max_lag` holds: the rows
of older versions that they wait for may be behind them.

What always holds: rows and bytes in the stream and admitted to it never pass a limit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from dataplane.errors import LimitExceeded
from dataplane.stream.settings import Settings

_numbers = itertools.count(1)
"""Of tickets: of no two streams the same, nor of what keeps a stream's limits now and what did before."""


@dataclass(slots=True, eq=False)
class Entry:
    """Somebody who waits to append. `admit(ticket)` is called once, or `fail(error)`."""

    client: Hashable
    rows: int
    nbytes: int
    version: int
    admit: Callable[[int], None]
    fail: Callable[[Exception], None]


@dataclass(frozen=True, slots=True)
class Held:
    """What the stream holds. `oldest`: the first policy version that a task has rows of to do, None for none."""

    rows: int
    nbytes: int
    oldest: int | None


class Admission:
    """The entries and tickets of one stream, of which `held()` tells what is in it."""

    def __init__(self, settings: Settings, held: Callable[[], Held]) -> None:
        self._settings = settings
        self._held = held
        self._entries: dict[Entry, None] = {}  # in the order in which they came
        self._tickets: dict[int, Entry] = {}
        self._rows = 0
        self._nbytes = 0

    def configure(self, settings: Settings) -> None:
        """The limits are these from now on."""
        self._settings = settings

    def __len__(self) -> int:
        """How many wait."""
        return len(self._entries)

    def enter(self, entry: Entry) -> None:
        """Let the entry in as soon as the limits allow it. Raises LimitExceeded where they never will."""
        self._check(entry)
        self._entries[entry] = None
        self.let_in()

    def _check(self, entry: Entry) -> None:
        for what, asked, limit in (
            ("rows of a stream", entry.rows, self._settings.max_rows),
            ("bytes of a stream", entry.nbytes, self._settings.max_bytes),
        ):
            if limit and asked > limit:
                raise LimitExceeded(
                    f"an append of {asked} {what} can never fit its {limit}", what=what, asked=asked, limit=limit
                )

    def fits(self, entry: Entry) -> bool:
        """Whether the entry is within the limits, and nobody waits before it: rows that come in the same moment need no
        ticket. Raises LimitExceeded where they never will be."""
        self._check(entry)
        return not self._entries and not self.full(entry)

    def let_in(self) -> None:
        """Something may have gone: admit who fits now."""
        for entry in list(self._entries):
            why = self.full(entry)
            if why == "max_lag":
                continue
            if why:
                break
            del self._entries[entry]
            ticket = next(_numbers)
            self._tickets[ticket] = entry
            self._rows += entry.rows
            self._nbytes += entry.nbytes
            entry.admit(ticket)

    def full(self, entry: Entry) -> str:
        """Which limit the entry would pass; empty for none."""
        limits = self._settings
        if limits.max_lag < 0 and not limits.max_rows and not limits.max_bytes:
            return ""
        held = self._held()
        if limits.max_lag >= 0:
            oldest = self.oldest
            if oldest is not None and entry.version - oldest > limits.max_lag:
                return "max_lag"
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

    def withdraw(self, entry: Entry) -> None:
        """The entry no longer waits."""
        if entry in self._entries:
            del self._entries[entry]
            self.let_in()

    def ticket(self, number: int) -> Entry | None:
        """Who was admitted with this ticket, and has not come."""
        return self._tickets.get(number)

    def clients(self) -> set[Hashable]:
        """Those that wait, or were admitted and have not come."""
        return {entry.client for entry in (*self._entries, *self._tickets.values())}

    def coming(self) -> dict[Hashable, int]:
        """How many bytes each client was admitted to bring and has not brought."""
        found: dict[Hashable, int] = {}
        for entry in self._tickets.values():
            found[entry.client] = found.get(entry.client, 0) + entry.nbytes
        return found

    def give_back(self, number: int) -> None:
        """What was admitted has come, or does not."""
        if number in self._tickets:
            self._end(number)
            self.let_in()

    def _end(self, number: int) -> None:
        entry = self._tickets.pop(number)
        self._rows -= entry.rows
        self._nbytes -= entry.nbytes

    def leave(self, client: Hashable) -> None:
        """The client has gone: it waits no longer, and its tickets go back, all at once: who waits for one of them is
        not passed by who waits for another."""
        self._entries = {entry: None for entry in self._entries if entry.client != client}
        for number in [number for number, entry in self._tickets.items() if entry.client == client]:
            self._end(number)
        self.let_in()

    def refuse(self, error: Exception) -> None:
        """Nobody is admitted any more; who waits is told so."""
        entries, self._entries = self._entries, {}
        for entry in entries:
            entry.fail(error)

    def forget_held(self) -> None:
        """The stream is no more, and holds nothing."""
        self._held = _empty


def _empty() -> Held:
    return Held(0, 0, None)
