"""Which groups and keys a partition takes the first row of, while placement tables change.

A producer that knows a new version of its stream's table asks for a group where older versions have it. A partition
that has no part of the group disowns it: by tables older than the producer's nobody begins it there any more. So two
producers with two versions of the table do not begin one group at two places. Once no row is left that came by a
version, or an older one, these bring none any more, and what was disowned for their sake is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dataplane.stream.books import Books

YES, NO = b"\x01", b"\x00"


class OwnershipState(msgspec.Struct, array_like=True):
    """All of it. `arrived`: by version of the table, the last offset that came by it."""

    fence: int = 0
    retired: bool = False
    disowned: list[tuple[str | int, int]] = []
    arrived: list[tuple[int, int]] = []


class Ownership:
    """See the module."""

    def __init__(self, state: OwnershipState | None = None) -> None:
        state = state or OwnershipState()
        self.retired = state.retired
        """Whether nothing is taken any more."""
        self._fence = state.fence  # by this version of the table, and older ones, nothing is taken
        self._disowned = dict(state.disowned)  # -> not by a version older than this
        self._arrived = dict(state.arrived)

    def moved(self, table: int, groups: Sequence[str | int], books: Books) -> list[str | int] | None:
        """Of rows that come by this version of the table, the groups or keys that belong elsewhere; None if they are
        taken."""
        if self.retired or 0 < table <= self._fence:
            return list(dict.fromkeys(groups))
        if not table or not self._disowned:
            return None
        names = [name for name in dict.fromkeys(groups) if self._disowned.get(name, 0) > table]
        return [name for name in names if not _holds(books, name)] or None

    def arrived(self, table: int, last: int) -> None:
        """Rows up to this offset came by this version of the table."""
        if table:
            self._arrived[table] = last

    def disown(self, groups: Sequence[str | int], table: int, books: Books) -> bytes:
        """By a table of this version these belong elsewhere; a byte for each, 1 if a part of it is here."""
        held = [_holds(books, name) for name in groups]
        for name, is_held in zip(groups, held, strict=True):
            if not is_held and table - 1 > self._fence:
                self._disowned[name] = max(table, self._disowned.get(name, 0))
        return bytes(held)

    def outlived(self, table: int, books: Books) -> bool:
        """Whether no row is left that came by this version of the table, or an older one."""
        last = max((last for version, last in self._arrived.items() if version <= table), default=-1)
        return last < books.rows.first

    def outlive(self, table: int, books: Books) -> bool:
        """The same; if so, they bring none any more."""
        if not self.outlived(table, books):
            return False
        self._fence = max(self._fence, table)
        self._arrived = {version: last for version, last in self._arrived.items() if version > self._fence}
        self._disowned = {name: version for name, version in self._disowned.items() if version - 1 > self._fence}
        return True

    def state(self) -> OwnershipState:
        return OwnershipState(self._fence, self.retired, list(self._disowned.items()), list(self._arrived.items()))


def _holds(books: Books, name: str | int) -> bool:
    return books.groups.number(name) is not None or (isinstance(name, str) and books.keys.has(name))
