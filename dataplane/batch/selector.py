"""What users may write between the brackets of a reference, and the positions it picks.

Rows are counted like a sequence's, and lists of positions mean what they mean to NumPy. A position beyond
the end is an IndexError; anything that picks no rows at all is a Misuse.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from dataplane.batch.rows import Index
from dataplane.errors import Misuse

#: A position; a slice; a list, NumPy array or torch tensor of positions or of one flag a row.
Selector = SupportsIndex | slice | Sequence[int] | Sequence[bool] | npt.NDArray[Any] | Any


def positions_of(selector: Selector, rows: int) -> range | Index:
    """The positions, from 0 on, that the selector picks of `rows` rows: a range of step 1 where it can be one."""
    if isinstance(selector, slice):
        picked = sliced(selector, rows)
        return picked if picked.step == 1 else np.arange(picked.start, picked.stop, picked.step, dtype=np.int64)
    if isinstance(selector, bool | np.bool_ | str | tuple):
        hint = f"; select({selector!r}) picks a column" if isinstance(selector, str) else ""
        raise Misuse(f"rows are picked by a position, a slice, or a list of positions or flags, not {selector!r}{hint}")
    if isinstance(selector, int) or (hasattr(selector, "__index__") and getattr(selector, "ndim", 0) == 0):
        return _one(selector, rows)
    return _many(selector, rows)


def sliced(selector: slice, rows: int) -> range:
    """The positions of a slice of `rows` rows. Raises Misuse where its bounds are not whole, or its step is 0."""
    try:
        return range(rows)[selector]
    except (TypeError, ValueError) as error:
        raise Misuse(f"rows are not picked by {selector!r}: {error}") from None


def _one(selector: SupportsIndex, rows: int) -> range:
    position = operator.index(selector)
    if not -rows <= position < rows:
        raise IndexError(f"row {position} of {rows} rows")
    position %= rows
    return range(position, position + 1)


def _many(selector: Any, rows: int) -> Index:
    try:
        array = np.asarray(selector.detach().cpu() if hasattr(selector, "detach") else selector)
    except (TypeError, ValueError) as error:
        raise Misuse(f"rows are not picked by a {type(selector).__name__}: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "biu"):
        raise Misuse(f"rows are picked by a flat list of integers or flags, not {array.dtype} of shape {array.shape}")
    if array.dtype.kind == "b":
        if len(array) != rows:
            raise Misuse(f"a mask of {len(array)} flags does not fit {rows} rows")
        return np.flatnonzero(array)
    if not array.size:
        return np.empty(0, dtype=np.int64)
    low, high = int(array.min()), int(array.max())
    if low < -rows or high >= rows:
        raise IndexError(f"row {high if high >= rows else low} of {rows} rows")
    positions = array.astype(np.int64)
    return np.where(positions < 0, positions + rows, positions) if low < 0 else positions
