"""Rows whose ack is prepared and not decided: those of a delivery of several partitions, until each has answered.

An ack over several partitions is in two phases (two-phase commit, Gray 1978). Each partition prepares the rows of its
grant, which is over then; once all have, each settles them, and where one has refused, the others give theirs back. So
an ack counts for all of its rows, or for none.

What always holds: a prepared row is leased to nobody for its task, on each replica and whoever leads, and is neither
done nor lost before it is decided: what its nodes take with them is looked at again then. To settle what is prepared is
never refused, as long as its client is there: one that ends has given back what it has prepared.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dataplane.errors import LeaseExpired
from dataplane.stream.books import Books
from dataplane.stream.packing import Packed, pack, unpack
from dataplane.stream.page import Flags, Index
from dataplane.stream.progress import ACKED

PreparedState = tuple[int, str, int, Packed]
"""The number of a grant, whose it was, of which task, and its rows."""


class PreparedRows:
    """Those of one partition, by the numbers of their grants."""

    __slots__ = ("_books", "_prepared")

    def __init__(self, books: Books, state: Iterable[PreparedState] = ()) -> None:
        """Raises ValueError for the state of other rows."""
        self._books = books
        self._prepared = {grant: (client, task, unpack(rows)) for grant, client, task, rows in state}
        for _, task, rows in self._prepared.values():
            there = 0 <= task < len(books.settings.tasks) and books.rows.there(rows).all()
            if not (there and books.progress.open(task, books.rows.places(rows), len(rows)).all()):
                raise ValueError("rows that are prepared, and are gone or done")
        self.hide()

    def state(self) -> list[PreparedState]:
        """All of it, as a replica's state."""
        return [(grant, client, task, pack(rows)) for grant, (client, task, rows) in sorted(self._prepared.items())]

    def __len__(self) -> int:
        return len(self._prepared)

    @property
    def clients(self) -> set[str]:
        """Those who have prepared something."""
        return {client for client, _, _ in self._prepared.values()}

    def has(self, grant: int, client: str, *, keep: bool) -> bool:
        """Whether this client has prepared the rows of this grant. Raises LeaseExpired where it has not, or no more,
        and they are to be kept."""
        found = grant in self._prepared and self._prepared[grant][0] == client
        if keep and not found:
            raise LeaseExpired("these rows go to others: who had them was taken for dead before all was settled")
        return found

    def add(self, grant: int, client: str, task: int, rows: Index) -> None:
        """These rows, which are there and open to the task, are prepared."""
        self._prepared[grant] = client, task, rows
        self._hide(task, rows)

    def hide(self) -> None:
        """Nobody leads, or another does: leases are forgotten, and these rows are nobody's still."""
        for _, task, rows in self._prepared.values():
            self._hide(task, rows)

    def _hide(self, task: int, rows: Index) -> None:
        self._books.progress.reserve(task, self._books.rows.places(rows))

    def conclude(self, grant: int, *, keep: bool) -> Index:
        """The rows that were prepared under this grant are acked or, if not `keep`, given back as when a lease runs
        out. Those that are there still."""
        _, task, rows = self._prepared.pop(grant)
        if keep:
            self._books.settle(task, rows, ACKED)
        else:
            self._books.give_back(task, rows)
        return rows[self._books.rows.there(rows)]

    def of(self, clients: Iterable[str]) -> list[int]:
        """The grants under which these clients have prepared something."""
        ended = set(clients)
        return [grant for grant, (client, _, _) in self._prepared.items() if client in ended]

    def among(self, rows: Index) -> Flags:
        """Which of these rows are prepared for some task."""
        flags = np.zeros(len(rows), np.bool_)
        for _, _, prepared in self._prepared.values():
            flags |= np.isin(rows, prepared)
        return flags

    def clear(self) -> None:
        """All rows are gone."""
        self._prepared.clear()
