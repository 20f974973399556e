"""Handles to rows of multimodal inputs: a `LazyRow` replaces a dict of tensors, one a row.

    handles = put_rows([{"pixel_values": pixels, "image_grid_thw": grid}, None, ...], repeated=True)

A handle is a mapping: frameworks pass it through chunking, concatenation, pickle and Ray like a dict, in a few hundred
bytes, and read it at the first access. It is not a dict: an encoder may copy only the stored items of a subclass of
dict, and a handle has none yet.

Invariants: a handle has no memory and pins nothing; only the values that it returned do. These values are zero-copy,
writable and private to this process, and after they are dropped, an access returns the original values again. The keys
of a row and the types of its values are the original ones. Tensors and NumPy arrays of numbers are stored as columns;
all other values of a row as MessagePack, in one more column, under a key that no input can have. NumPy treats a handle
as one element, although it has a length. Neighbouring rows are read together (`Windows`), and stay pinned only while a
tensor of them is alive; if they cannot be read together, they are read one by one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.batch.batch import Batch, Column
from dataplane.batch.ref import BatchRef
from dataplane.batch.tensors import is_tensor
from dataplane.client.sync import Plane
from dataplane.errors import Backpressure, LimitExceeded, Lost, Misuse
from dataplane.integrations.process import plane as plane_of_process

#: The key of a stored row for values without a tensor column: (values by key, None for those with a column; keys of
#: NumPy arrays), or None for a row that was None. Inputs are passed to models as keyword arguments, which cannot have
#: this name.
REST = "/"

_COLUMN = "inputs"


class LazyRow(Mapping[str, Any]):
    """One row of a struct column that `encoded` produced. Picklable, hashable."""

    __slots__ = ("__weakref__", "_column", "_keys", "_ref", "_row", "_windows")

    def __init__(self, ref: BatchRef, column: str) -> None:
        """ref: one row. Raises Misuse for more or fewer, SchemaMismatch if there is no such column."""
        if len(ref) != 1:
            raise Misuse(f"a LazyRow is one row, not {len(ref)}: use lazy_rows(ref, column) for a handle a row")
        self._ref = ref.select(column)
        self._column = column
        self._keys: tuple[str, ...] | None = None  # those of the row are known after the first read
        self._windows: Windows | None = None  # of the rows beside it, and which it is
        self._row = 0

    @property
    def ref(self) -> BatchRef:
        """The reference to the row in its column."""
        return self._ref

    @property
    def column(self) -> str:
        """The name of the struct column."""
        return self._column

    def read(self) -> dict[str, Any]:
        """Read the row as a dict. Raises as `Plane.get`."""
        if self._windows is None:
            return self._row_of(plane_of_process().get(self._ref), 0)
        batch, at = self._windows.batch(self._row)
        row = self._row_of(batch, at)
        self._windows.keep(self._row, batch, row)
        return row

    def __getitem__(self, key: str) -> Any:
        if not self._may_have(key) or (self._keys is not None and key not in self._keys):
            raise KeyError(key)
        return self.read()[key]

    def __contains__(self, key: object) -> bool:
        return self._may_have(key) and key in self._names()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def items(self) -> Any:
        """Keys and values; the row is read once for all of them."""
        return self.read().items()

    def values(self) -> Any:
        """Values; the row is read once for all of them."""
        return self.read().values()

    def __eq__(self, other: object) -> bool:
        """Whether both refer to the same stored row."""
        if not isinstance(other, LazyRow):
            return NotImplemented
        return self._column == other._column and self._ref == other._ref

    def __hash__(self) -> int:
        return hash((self._column, self._ref))

    def __repr__(self) -> str:
        return f"LazyRow({self._ref!r})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[np.object_]:
        """One element: `np.array([row, ...], dtype=object)` has one handle a row, and not its keys."""
        element = np.empty((), object)
        element[()] = self
        return element

    def __reduce__(self) -> tuple[Callable[[bytes, str], LazyRow], tuple[bytes, str]]:
        return _received, (self._ref.encode(), self._column)

    def _row_of(self, batch: Batch, at: int) -> dict[str, Any]:
        row = read_row(batch[self._column][at : at + 1]) or {}
        self._keys = tuple(row)
        return row

    def _names(self) -> tuple[str, ...]:
        return tuple(self.read()) if self._keys is None else self._keys

    def _may_have(self, key: object) -> bool:
        """Whether the schema allows the key: keys that it excludes need no read."""
        keys = dict(self._ref.schema[self._column].children)
        return REST in keys or key in keys


def lazy_rows(ref: BatchRef, column: str) -> list[LazyRow]:
    """A handle for each row of a struct column. In this process, neighbouring handles that are read one after another
    are read together."""
    chosen = ref.select(column)
    windows = Windows(chosen)
    handles = []
    for number, row in enumerate(chosen):
        handle = LazyRow(row, column)
        handle._windows, handle._row = windows, number
        handles.append(handle)
    return handles


def put_rows(
    rows: Sequence[Mapping[str, Any] | None],
    *,
    repeated: bool = False,
    scope: str | None = None,
    plane: Plane | None = None,
    timeout: float = 60.0,
) -> list[LazyRow | None]:
    """Store rows of inputs, as a processor returns them. Returns a handle for each row, and None for each None.

    repeated: rows may be equal, as those of the responses of one prompt: store equal rows once.

    Raises as `Plane.put`.
    """
    if not rows:
        return []
    to = plane or plane_of_process()
    ref = to.put({_COLUMN: encoded(rows)}, scope=scope, dedupe=[_COLUMN] if repeated else (), timeout=timeout)
    handles = lazy_rows(ref, _COLUMN)
    return [None if row is None else handle for row, handle in zip(rows, handles, strict=True)]


def encoded(rows: Sequence[Mapping[Any, Any] | None]) -> list[dict[str, Any]]:
    """Rows in the form of a struct column; `read_row` returns the original."""
    return [_encoded(row) for row in rows]


def read_rows(column: Column) -> list[dict[str, Any] | None]:
    """The rows of such a column, each in place: equal rows that were stored once share memory here too."""
    if all(key == REST for key, _ in column.field.children):
        return [_decoded(row) for row in column.to_list()]
    return [read_row(column[row : row + 1]) for row in range(len(column))]


def read_row(column: Column) -> dict[str, Any] | None:
    """The one row of such a column."""
    return _decoded(column.torch()[0])


def _decoded(row: dict[str, Any]) -> dict[str, Any] | None:
    """The original of an encoded row."""
    if REST not in row:
        return row
    rest = row.pop(REST)
    if rest is None:
        return None
    values, arrays = rest
    # a key whose values differ in dtype or dimensions is of objects: its arrays are arrays already
    own = {key: value.numpy() if key in arrays and is_tensor(value) else value for key, value in row.items()}
    return {**values, **own}


def _encoded(row: Mapping[Any, Any] | None) -> dict[str, Any]:
    if row is None:
        return {REST: None}
    stored: dict[str, Any] = {}
    values: dict[Any, Any] = {}
    arrays: list[str] = []
    for key, value in row.items():
        of_column = isinstance(key, str) and key not in ("", REST)
        values[key] = None  # keeps the place of a value with a column
        if of_column and is_tensor(value):
            stored[key] = value
        elif of_column and isinstance(value, np.ndarray) and value.ndim and _is_of_torch(value.dtype):
            stored[key] = value
            arrays.append(key)
        else:
            values[key] = value
    return {**stored, REST: (values, arrays)} if arrays or len(stored) < len(values) else stored


def _is_of_torch(dtype: np.dtype[Any]) -> bool:
    """Whether a column of such arrays can be read as tensors: torch has no other byte order."""
    return dtype.kind in "biufc" and dtype.isnative


def _received(ref: bytes, column: str) -> LazyRow:
    return LazyRow(BatchRef.decode(ref), column)


_WINDOW = 16


class Windows:
    """Rows of one reference. Any thread may read."""

    def __init__(self, ref: BatchRef) -> None:
        self._ref = ref
        self._open: dict[int, Batch] = {}
        self._living: dict[int, dict[int, weakref.ref[Any]]] = {}  # by window: of the tensors that it gave

    def batch(self, row: int) -> tuple[Batch, int]:
        """A batch with the row, and the position of the row in it. Raises as `Plane.get`."""
        number = row // _WINDOW
        batch = self._open.get(number)
        if batch is None:
            try:
                batch = plane_of_process().get(self._ref[number * _WINDOW : (number + 1) * _WINDOW])
            except (Lost, Backpressure, LimitExceeded):
                return plane_of_process().get(self._ref[row]), 0
        return batch, row % _WINDOW

    def keep(self, row: int, batch: Batch, given: dict[str, Any]) -> None:
        """Keep the batch while any of these tensors, which are views of it, is alive."""
        number = row // _WINDOW
        if len(batch) != len(self._ref[number * _WINDOW : (number + 1) * _WINDOW]):
            return  # it is one row of it
        living = self._living.setdefault(number, {})

        def gone(reference: weakref.ref[Any]) -> None:
            living.pop(id(reference), None)
            if not living:
                self._open.pop(number, None)

        for value in given.values():
            if is_tensor(value):
                reference = weakref.ref(value, gone)
                living[id(reference)] = reference
        if living:
            self._open[number] = batch
