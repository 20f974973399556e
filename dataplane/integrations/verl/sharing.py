"""Stores rows of fields; large values that this process has put before become links to the stored rows.

Invariants: each returned cell belongs to one row only, and can be freed separately; of a failed put nothing stays
stored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dataplane.batch import object_codec, object_rows
from dataplane.batch.put_plan import values_of
from dataplane.batch.small_columns import Single, SmallColumns, laid_out_row, single
from dataplane.batch.values import Values
from dataplane.client import stored_rows
from dataplane.errors import Freed, LimitExceeded, OwnerDied, PeerUnavailable
from dataplane.integrations.process import with_plane
from dataplane.integrations.sharing import FEW, LocationCache, keys_of, keys_of_columns
from dataplane.integrations.verl import cells
from dataplane.integrations.verl.entries import ObjectEntries

Cells = cells.Made
_Store = Callable[[Mapping[str, Values], Mapping[str, bytes], float], Cells]

_known: LocationCache[bytes] = LocationCache()
_LONGEST_S = 2.0  # the longest wait for another thread's put of a value: that may be waiting for room


def put(columns: Mapping[str, Any], how: Mapping[str, bytes], timeout: float) -> Cells:
    """Store the columns. Returns the cells of their rows, by field. `how`: how each is returned. Raises as
    `Plane.put`."""
    first = next(iter(columns.values()))
    if not getattr(first, "is_nested", False) and len(first) == 1:
        return _put_row(columns, how, timeout)
    return _shared(_values(columns), how, timeout, FEW, _stored)


def _split(columns: Mapping[str, Any]) -> tuple[SmallColumns | None, dict[str, Any]]:
    """The columns of one row: small ones, laid out, and large ones; None if there is too much for one layout."""
    small: list[tuple[str, Single]] = []
    large: dict[str, Any] = {}
    for name, each in columns.items():
        found = (
            single(name, each, as_object=type(each) is ObjectEntries)
            if id(each) not in map(id, large.values())
            else None
        )
        if found is None:
            large[name] = each
        else:
            small.append((name, found))
    return laid_out_row(small), large


def _put_row(columns: Mapping[str, Any], how: Mapping[str, bytes], timeout: float) -> Cells:
    """As `put`, for one row: its small fields are one shard."""
    row, large = _split(columns)
    if row is None:
        return _shared(_values(columns), how, timeout, FEW, _stored)
    made = _shared(_values(large), how, timeout, FEW, _stored) if large else {}
    try:
        node, shard = with_plane(lambda plane: stored_rows.put_row(plane, row, timeout))
    except BaseException:
        cells.drop(made)
        raise
    return made | cells.of_row(node, shard, row.columns, how)


def _values(columns: Mapping[str, Any]) -> dict[str, Values]:
    """The columns; those that are one object are made once. Raises SchemaMismatch."""
    seen: dict[int, Values] = {}
    values = {}
    for name, each in columns.items():
        if id(each) not in seen:
            seen[id(each)] = (object_codec.values_of if type(each) is ObjectEntries else values_of)(name, each)
        values[name] = seen[id(each)]
    return values


def restore(columns: Mapping[str, Values], how: Mapping[str, bytes], timeout: float) -> Cells:
    """As `put`, for rows of a file, which were put in other groups than they are read in: tensors of any number of
    rows are looked up, and rows of objects share their large parts."""
    return _shared(columns, how, timeout, sys.maxsize, _stored_in_parts)


def _shared(values: Mapping[str, Values], how: Mapping[str, bytes], timeout: float, few: int, store: _Store) -> Cells:
    def look(name: str, each: Values) -> list[bytes | None] | None:
        return keys_of(each, tensors=how[name] in (cells.TENSOR, cells.DENSE), how=how[name], few=few)

    keys = keys_of_columns(values, look)
    if not keys:
        return store(values, how, timeout)
    wanted = [key for several in keys.values() for key in several if key is not None]
    while True:
        with _known.claim(wanted, _LONGEST_S) as known:
            try:
                return _Put(values, how, keys, known, store).run(timeout)
            except _Stale as stale:
                _known.forget(stale.places)


class _Stale(Exception):
    """A value that was known to be stored is gone."""

    def __init__(self, places: dict[bytes, bytes]) -> None:
        super().__init__()
        self.places = places


class _Put:
    """One put. `keys`: of the fields that are looked up; `known`: the cells of earlier values, by their keys."""

    def __init__(
        self,
        values: Mapping[str, Values],
        how: Mapping[str, bytes],
        keys: Mapping[str, Sequence[bytes | None]],
        known: dict[bytes, bytes],
        store: _Store,
    ) -> None:
        self._values = values
        self._how = how
        self._keys = keys
        self._known = known
        self._stored = store
        self._made: dict[str, list[bytes | None]] = {name: [None] * each.rows for name, each in values.items()}

    def run(self, timeout: float) -> Cells:
        """Store it. Raises _Stale, and as `put`."""
        try:
            self._link()
            while any(None in made for made in self._made.values()):
                self._store(timeout)
                self._link()  # equal rows of this put
            return {name: [cell for cell in made if cell is not None] for name, made in self._made.items()}
        except BaseException:
            cells.drop(self._made)
            raise

    def _link(self) -> None:
        """Create a cell of its own for each row whose value is stored, with one request if all succeed."""
        places = [
            (name, row, key)
            for name, keys in self._keys.items()
            for row, key in enumerate(keys)
            if key is not None and key in self._known and self._made[name][row] is None
        ]
        if not places:
            return
        linked: list[bytes | None]
        try:
            linked = [*cells.retained([self._known[key] for _, _, key in places])]
        except (Freed, OwnerDied, PeerUnavailable, LimitExceeded):  # of one of them, or of so many at once
            linked = [None] * len(places)
        for (name, row, key), cell in zip(places, linked, strict=True):
            if cell is None and key in self._known:
                cell = self._linked(key)
            self._made[name][row] = cell

    def _linked(self, key: bytes) -> bytes | None:
        """A new cell of a stored value; None if the node cannot add another owner to it."""
        try:
            (cell,) = cells.retained([self._known[key]])
            return cell
        except (Freed, OwnerDied, PeerUnavailable):  # an absent node may come back, but no put waits for it
            raise _Stale({key: self._known[key]}) from None
        except LimitExceeded:
            del self._known[key]
            return None

    def _store(self, timeout: float) -> None:
        """Store the rows that have no cell yet, once for equal rows. Fields of which all rows are stored go
        together."""
        whole, parts = {}, {}
        seen: set[bytes] = set()
        for name, values in self._values.items():
            rows = self._fresh(name, values.rows, seen)
            if len(rows) == values.rows:
                whole[name] = values
            elif len(rows):
                parts[name] = rows
        if whole:
            everything = {name: range(values.rows) for name, values in whole.items()}
            self._place(self._stored(whole, self._how, timeout), everything)
        for name, rows in parts.items():
            taken = self._values[name].take(np.array(rows, np.int64))
            self._place(self._stored({name: taken}, self._how, timeout), {name: rows})

    def _fresh(self, name: str, rows: int, seen: set[bytes]) -> list[int]:
        """The rows of a field that are to be stored. Their keys are added to `seen`."""
        keys = self._keys.get(name, [None] * rows)
        fresh = []
        for row, key in enumerate(keys):
            if self._made[name][row] is None and (key is None or key not in seen):
                fresh.append(row)
                if key is not None:
                    seen.add(key)
        return fresh

    def _place(self, stored: Cells, rows: Mapping[str, Sequence[int]]) -> None:
        """Record the cells of stored rows."""
        learnt = {}
        for name, own in stored.items():
            keys = self._keys.get(name)
            for row, cell in zip(rows[name], own, strict=True):
                self._made[name][row] = cell
                if keys is not None and (key := keys[row]) is not None:
                    learnt[key] = cell
        self._known |= learnt
        _known.learn(learnt)


def _stored(values: Mapping[str, Values], how: Mapping[str, bytes], timeout: float) -> Cells:
    return cells.cells(with_plane(lambda plane: plane.put(values, timeout=timeout)), how)


def _stored_in_parts(values: Mapping[str, Values], how: Mapping[str, bytes], timeout: float) -> Cells:
    return _stored({name: object_rows.shared(name, each) for name, each in values.items()}, how, timeout)
