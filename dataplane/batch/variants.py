"""Columns whose rows are of several kinds: a struct with a key for each kind, of which a row has one or more.

For doors into systems in which every row is a value by itself: text here, a tensor there, of another dtype elsewhere.
Such columns always go together with others of their name, since a key that one lacks is a key that its rows lack.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.batch import reading
from dataplane.batch.batch import Column
from dataplane.batch.values import Values, struct

Flags = npt.NDArray[np.bool_]


class Variant(NamedTuple):
    """Rows of one kind: its name, which rows of the column they are, and those rows."""

    name: str
    present: Flags
    column: Column


def join(parts: Sequence[tuple[str, Flags | None, Values]], rows: int) -> Values:
    """The column of these kinds: the name of each, which rows are of it (None: all), and those rows."""
    flags = [np.ones(rows, np.bool_) if present is None else present for _, present, _ in parts]
    return struct([name for name, _, _ in parts], flags, [values for _, _, values in parts], rows)


def split(column: Column) -> list[Variant]:
    """The types of value that the column has, each a column of its own. If all rows have one type, the column is read
    in place, without a copy."""
    found = []
    for name, field in column.field.children:
        present, rows = reading.presence(column.reading, name, field)
        if present.any():
            child = Column.__new__(Column)._bind(
                f"{column.name}{name}", field, rows.selections, rows.order, cut=rows.cut
            )
            found.append(Variant(name, present, child))
    return found
