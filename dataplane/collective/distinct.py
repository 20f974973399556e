"""A column as its distinct stored rows, and the index of each of its rows among them.

Rows of a reference may repeat (`BatchRef.repeat`), and a stored row may stand for several rows (`put(dedupe=...)`).
Each stored row is sent once.
"""

from __future__ import annotations

import numpy as np

from dataplane.batch.batch import Column
from dataplane.batch.layout import Index
from dataplane.batch.pieces import Selection, Stored
from dataplane.batch.rows import Rows


def distinct(column: Column) -> tuple[Column, Index | None]:
    """The column's distinct stored rows, in the order in which they are stored, and for each row of the column its
    position among those; the column itself and None if no row repeats."""
    reading = column.reading
    if reading.run is not None or not reading.rows:
        return column, None
    part, rows = reading.places()
    once, order = np.unique(np.stack([part, rows]), axis=1, return_inverse=True)
    if once.shape[1] == len(rows):
        return column, None
    selections = []
    for number, (stored, _) in enumerate(reading.parts):
        chosen = once[1][once[0] == number]
        if len(chosen):
            selections.append(_selected(stored, chosen))
    return Column.of(column.name, column.field, selections), order.reshape(-1).astype(np.int64)


def _selected(stored: Stored, rows: Index) -> Selection:
    """These stored rows. Rows of objects keep their index, without which shared parts are not found."""
    index = stored.tables.stored_row
    if stored.layout.field.kind != "object" or index is None:
        return Selection(stored.unindexed(), Rows.index(rows))
    named, first = np.unique(index, return_index=True)
    return Selection(stored, Rows.index(first[np.searchsorted(named, rows)]))
