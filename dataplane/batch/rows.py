"""The rows of a stored column that a reference refers to: a range if possible, else an array of row numbers.

A `RowIndices` is immutable. Its row numbers are not negative, may repeat, and may be in any order. A range is encoded
in a few bytes. An index takes one integer for each row, of the smallest unsigned type that can represent all of them.

`positions_of` interprets the index between the brackets of a reference: a position or slice as in a Python sequence, a
list as in NumPy. It raises IndexError for a position beyond the end, and Misuse for an invalid index.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from dataplane.errors import Misuse

Index = npt.NDArray[np.int64]

_CODES = "BHIQ"  # the numpy codes of the unsigned integers of 1, 2, 4 and 8 bytes


class RowIndices:
    """An immutable sequence of row numbers, either `range(start, stop)` or an index array."""

    __slots__ = ("_index", "start", "stop")

    def __init__(self, start: int, stop: int, index: Index | None = None) -> None:
        self.start = start
        self.stop = stop
        self._index = index

    @classmethod
    def range(cls, start: int, stop: int) -> RowIndices:
        """The rows from `start` up to `stop`, excluded. Raises ValueError for an invalid range."""
        if not 0 <= start <= stop:
            raise ValueError(f"rows {start}:{stop} are not a range")
        return cls(start, stop)

    @classmethod
    def index(cls, index: npt.ArrayLike) -> RowIndices:
        """The rows that `index` (1-D, integers) lists, as a range if they are one. Raises ValueError for a negative
        row."""
        array = np.array(index, dtype=np.int64, copy=True).reshape(-1)
        if not len(array):
            return cls(0, 0)
        first, last = int(array[0]), int(array[-1])
        if first >= 0 and last - first == len(array) - 1 and bool((array[1:] - array[:-1] == 1).all()):
            return cls(first, last + 1)
        low, high = int(array.min()), int(array.max())
        if low < 0:
            raise ValueError(f"row {low} is negative")
        array.setflags(write=False)
        return cls(low, high + 1, array)

    def __len__(self) -> int:
        return self.stop - self.start if self._index is None else len(self._index)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowIndices):
            return NotImplemented
        return self is other or (len(self) == len(other) and bool((self.array() == other.array()).all()))

    def __hash__(self) -> int:
        return hash((len(self), self.start, self.stop))

    def __repr__(self) -> str:
        return f"Rows({self.start}:{self.stop})" if self._index is None else f"Rows({self._index.tolist()})"

    @property
    def slice(self) -> slice | None:
        """The rows as a slice, or None if they are an index."""
        return slice(self.start, self.stop) if self._index is None else None

    def array(self) -> Index:
        """The row numbers, int64. Read-only if they are an index."""
        return np.arange(self.start, self.stop, dtype=np.int64) if self._index is None else self._index

    def take(self, inner: RowIndices) -> RowIndices:
        """The rows at the positions `inner` of this sequence. Raises IndexError beyond its end."""
        if inner.stop > len(self) and len(inner):
            raise IndexError(f"position {inner.stop - 1} of {len(self)} rows")
        if self._index is None:
            if inner._index is None:
                return RowIndices(self.start + inner.start, self.start + inner.stop)
            return RowIndices.index(inner._index + self.start)
        part = self._index[inner.start : inner.stop] if inner._index is None else self._index[inner._index]
        return RowIndices.index(part)

    def distinct(self) -> tuple[RowIndices, Index | None]:
        """The distinct rows, ascending, and the position of each row among them (None: they are all rows, in order)."""
        if self._index is None:
            return self, None
        unique, inverse = np.unique(self._index, return_inverse=True)
        return RowIndices.index(unique), inverse.astype(np.int64, copy=False)

    def encode(self) -> tuple[int, int, bytes]:
        """Plain values for a message: start, stop, and an index as little-endian bytes (empty: a range)."""
        if self._index is None:
            return self.start, self.stop, b""
        code = _CODES[sum(self.stop > bound for bound in (1 << 8, 1 << 16, 1 << 32))]
        packed = (self._index).astype(f"<{np.dtype(code).str[1:]}")
        return self.start, self.stop, code.encode() + packed.tobytes()

    @classmethod
    def decode(cls, encoded: Sequence[int | bytes]) -> RowIndices:
        """The inverse of `encode`. Raises ValueError for other input."""
        start, stop, packed = encoded
        if not (isinstance(start, int) and isinstance(stop, int) and isinstance(packed, bytes)):
            raise ValueError("rows are two integers and bytes")
        if not packed:
            return cls.range(start, stop)
        code = chr(packed[0])
        if code not in _CODES:
            raise ValueError(f"rows with the unknown code {code!r}")
        array = np.frombuffer(packed, dtype=f"<{np.dtype(code).str[1:]}", offset=1)
        if code == "Q" and len(array) and int(array.max()) > sys.maxsize:
            raise ValueError("a row number beyond 63 bits")
        return cls.index(array.astype(np.int64))


#: A position; a slice; a list, NumPy array or torch tensor of positions, or of one flag for each row.
Selector = SupportsIndex | slice | Sequence[int] | Sequence[bool] | npt.NDArray[Any] | Any


def positions_of(selector: Selector, rows: int) -> range | Index:
    """The positions, from 0 on, that the selector picks of `rows` rows: a range of step 1 if possible. Raises as the
    module says."""
    if isinstance(selector, slice):
        picked = positions_in(selector, rows)
        return picked if picked.step == 1 else np.arange(picked.start, picked.stop, picked.step, dtype=np.int64)
    if isinstance(selector, bool | np.bool_ | str | tuple):
        hint = f"; select({selector!r}) picks a column" if isinstance(selector, str) else ""
        raise Misuse(f"rows are picked by a position, a slice, or a list of positions or flags, not {selector!r}{hint}")
    if isinstance(selector, int) or (hasattr(selector, "__index__") and getattr(selector, "ndim", 0) == 0):
        return _position(selector, rows)
    return _positions(selector, rows)


def positions_in(selector: slice, rows: int) -> range:
    """The positions of a slice of `rows` rows. Raises Misuse if the bounds are not integers, or the step is 0."""
    try:
        return range(rows)[selector]
    except (TypeError, ValueError) as error:
        raise Misuse(f"rows are not picked by {selector!r}: {error}") from None


def _position(selector: SupportsIndex, rows: int) -> range:
    try:
        position = operator.index(selector)
    except TypeError:
        position = None
    if position is None or str(getattr(selector, "dtype", "")).endswith("bool"):
        raise Misuse(f"rows are picked by a position, a slice, or a list of positions or flags, not {selector!r}")
    if not -rows <= position < rows:
        raise IndexError(f"row {position} of {rows} rows")
    position %= rows
    return range(position, position + 1)


def _positions(selector: Any, rows: int) -> Index:
    try:
        array = np.asarray(selector.detach().cpu() if hasattr(selector, "detach") else selector)
    except (TypeError, ValueError) as error:
        raise Misuse(f"rows are not picked by a {type(selector).__name__}: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "biu"):
        found = f"{array.dtype} of shape {array.shape}" if array.ndim else repr(selector)
        raise Misuse(f"rows are picked by a position, a slice, or a flat list of positions or flags, not {found}")
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
