"""Rows that a partition has and gives to nobody yet: those of an append over several partitions, until all have it.

An append over several partitions is held back in each, and released once all have answered it, or dropped where one of
them has refused it. Its producer does not wait for the release. So nobody is given a row of an append that is refused.

What always holds: held rows are leased to nobody for every task, so they are not ready, not dropped under anybody, and
a stream that is closed is not drained before they are released. A producer that ends releases what it has held back:
whether all of that came is not known, as of any append that was not answered. The leader shows rows as soon as it is
asked to, before that is committed: what is acked of them is committed later still, and who leads next has them held
until it is asked again.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dataplane.stream.books import Books
from dataplane.stream.page import Index

HeldState = tuple[int, int, str]
"""The first of the rows, how many, and whose."""


class HeldRows:
    """Those of one partition."""

    __slots__ = ("_books", "_held", "_shown")

    def __init__(self, books: Books, state: Iterable[HeldState] = ()) -> None:
        """Raises ValueError for the state of other rows."""
        self._books = books
        self._held = {first: (count, client) for first, count, client in state}
        self._shown: dict[int, None] = {}  # by the leader, which is not committed
        for first, (count, _) in self._held.items():
            if not 0 <= first < first + count <= books.rows.next:
                raise ValueError("rows that are held back, and never came")
        self.hide()

    def state(self) -> list[HeldState]:
        """All of it, as a replica's state."""
        return sorted((first, count, client) for first, (count, client) in self._held.items())

    def __contains__(self, first: int) -> bool:
        return first in self._held

    def add(self, first: int, count: int, client: str) -> None:
        """Hold these rows back, which have come just now."""
        self._held[first] = count, client
        self._hide(first)

    def hide(self) -> None:
        """Nobody leads, or another does: what it has shown is not shown, and nobody has it."""
        self._shown.clear()
        for first in self._held:
            self._hide(first)

    def _hide(self, first: int) -> None:
        places = self._books.rows.places(self._rows(first))
        for task in range(len(self._books.settings.tasks)):
            self._books.progress.reserve(task, places)

    def show(self, first: int) -> None:
        """It was decided that these rows are released."""
        if first not in self._shown:
            self._shown[first] = None
            self._unhide(first)

    def release(self, first: int) -> Index:
        """These rows are released; those that are there."""
        if first not in self._held:
            return np.empty(0, np.int64)
        if first not in self._shown:
            self._unhide(first)
        self._shown.pop(first, None)
        rows = self._rows(first)
        del self._held[first]
        return rows

    def _unhide(self, first: int) -> None:
        rows = self._rows(first)
        places = self._books.rows.places(rows)
        self._books.progress.unlease(places)
        self._books.let_go(rows[self._books.progress.dropped(places, len(rows))])

    def of(self, clients: Iterable[str]) -> list[int]:
        """The first rows of what these clients hold back."""
        ended = set(clients)
        return [first for first, (_, client) in self._held.items() if client in ended]

    def clear(self) -> None:
        """All rows are gone."""
        self._held.clear()
        self._shown.clear()

    def _rows(self, first: int) -> Index:
        rows = np.arange(first, first + self._held[first][0])
        return rows[self._books.rows.there(rows)]
