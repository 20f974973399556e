"""`ProtoColumns`: the content of a DataProto without its meta_info, as a reference with the kind of each column.

Immutable and small. All operations of verl on the rows and columns of a DataProto are applied to the reference, in
the same order and with the same result; no bytes are moved and no request is sent. A tensor column and another column
must have different names, as in a TensorDict with both. `store` puts them, and `load` returns each with its type:

| a column of | is stored as | is returned as |
|---|---|---|
| `batch` | dense, or ragged if it is nested | a tensor on the CPU, in place if the rows are contiguous |
| `non_tensor_batch`, an array of numbers or times | dense | an array of that dtype |
| ... of text, or of bytes | text, or bytes | an array of text, or of bytes, as wide as its longest row |
| ... of text in several dimensions, of records | MessagePack, an array a row | an array of that dtype |
| ... of objects, all dicts or None, as `multi_modal_inputs` | struct | dicts of tensors in place, or handles |
| ... of objects, all `LazyRow` or None | not at all: it is stored already | as the one above |
| ... of any other objects, images among them, also in several dimensions | MessagePack, exact in type | the objects |

A value that MessagePack cannot represent (`dataplane.batch.object_codec`) is refused with the name of its column:
nothing is pickled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from tensordict import TensorDict

from dataplane.batch.batch import Batch, Column
from dataplane.batch.concat import concat
from dataplane.batch.ref import BatchRef
from dataplane.batch.rows import Selector, positions_of
from dataplane.batch.values import objects_of
from dataplane.client.sync import Plane
from dataplane.errors import Misuse, SchemaMismatch
from dataplane.integrations.rows import LazyRow, encoded, lazy_rows, read_rows

#: The original form of a column: a tensor; a NumPy array of numbers; one of text; an object array with a dict of
#: tensors, or None, a row; one of anything else; one of several dimensions; an array of records, or of text in several
#: dimensions.
Kind = Literal["tensor", "array", "text", "rows", "objects", "table", "stack"]


@dataclass(frozen=True, slots=True)
class ProtoColumns:
    """`rows` rows. `ref` is None if there is no column. `tensors`: whether there is a batch of tensors, which may be
    empty."""

    ref: BatchRef | None = None
    kinds: dict[str, Kind] = field(default_factory=dict)
    rows: int = 0
    tensors: bool = False

    def names(self, *, tensors: bool) -> list[str]:
        """The names of the tensors, or of all other columns, in order."""
        return [name for name, kind in self.kinds.items() if (kind == "tensor") == tensors]

    # rows

    def take(self, rows: Selector) -> ProtoColumns:
        """The rows selected by a slice, or by a list, array or tensor of positions or flags."""
        if self.ref is None:
            return replace(self, rows=len(positions_of(rows, self.rows)))
        ref = self.ref[rows]
        return replace(self, ref=ref, rows=len(ref))

    def repeat(self, times: int) -> ProtoColumns:
        """Each row `times` times in succession."""
        ref = None if self.ref is None else self.ref.repeat(times)
        return replace(self, ref=ref, rows=self.rows * times)

    def split(self, sizes: Sequence[int]) -> list[ProtoColumns]:
        """Consecutive parts of these sizes."""
        refs = [None for _ in sizes] if self.ref is None else self.ref.split(sizes)
        return [replace(self, ref=ref, rows=size) for ref, size in zip(refs, sizes, strict=True)]

    # columns

    def select(self, names: Sequence[str]) -> ProtoColumns:
        """These columns, in this order."""
        if self.ref is None or not names:
            if names:
                raise SchemaMismatch(f"there is no column {names[0]!r}; there are none", column=names[0])
            return replace(self, ref=None, kinds={})
        return replace(self, ref=self.ref.select(*names), kinds={name: self.kinds[name] for name in names})

    def drop(self, names: Sequence[str]) -> ProtoColumns:
        """All columns but these."""
        return self.select([name for name in self.kinds if name not in names])

    def rename(self, names: Mapping[str, str]) -> ProtoColumns:
        """The columns, renamed by this mapping of old to new names."""
        if self.ref is None:
            return self.select(list(names))
        kinds = {names.get(name, name): kind for name, kind in self.kinds.items()}
        return replace(self, ref=self.ref.rename(names), kinds=kinds)

    def beside(self, other: ProtoColumns) -> ProtoColumns:
        """These columns and those of `other`, which has as many rows, side by side; for a common name, the column of
        `other`."""
        if other.ref is None:
            return replace(self, tensors=self.tensors or other.tensors)
        mine = self.drop([name for name in other.kinds if name in self.kinds])
        ref = other.ref if mine.ref is None else mine.ref.union(other.ref)
        return ProtoColumns(ref, {**mine.kinds, **other.kinds}, other.rows, self.tensors or other.tensors)


def concatenated(several: Sequence[ProtoColumns]) -> ProtoColumns:
    """The rows of all, one after the other, in the columns of the first. All have the same columns.

    Raises SchemaMismatch if they do not, or if a column has different kinds.
    """
    first = several[0]
    for number, each in enumerate(several):
        for name in [*first.kinds, *each.kinds]:
            kinds = first.kinds.get(name, "not there"), each.kinds.get(name, "not there")
            if kinds[0] != kinds[1] and not (len(first.kinds) == len(each.kinds) and 0 in (first.rows, each.rows)):
                what = f"column {name!r} is {kinds[1]} in batch {number}, and {kinds[0]} in those before"
                raise SchemaMismatch(what, column=name, expected=kinds[0], found=kinds[1])
    rows = sum(each.rows for each in several)
    filled = [each for each in several if each.rows] or [first]
    if filled[0].ref is None:
        return replace(filled[0], rows=rows)
    names = list(first.kinds)
    refs = [each.ref.select(*names) for each in filled if each.ref is not None]
    return replace(filled[0].select(names), ref=concat(refs), rows=rows)


def sizes_of_chunks(rows: int, chunks: int, *, tensors: bool, padding: bool) -> list[int]:
    """The number of rows of each of verl's chunks: equal numbers; with padding, as torch splits tensors and NumPy
    arrays. Raises Misuse if that is not possible."""
    if rows % chunks and not padding:
        raise Misuse(
            f"{rows} rows do not make {chunks} equal chunks: pad them first, with verl's"
            " pad_dataproto_to_divisor(proto, size), or put meta_info from DataProto.from_dict(..., auto_padding=True)"
        )
    if not tensors:
        least, longer = divmod(rows, chunks)
        return [least + (part < longer) for part in range(chunks)]
    size = max(-(-rows // chunks), 1)
    sizes = [max(min(size, rows - start), 0) for start in range(0, size * chunks, size)]
    if rows and not sizes[-1]:
        raise Misuse(f"{rows} rows make fewer than {chunks} chunks of {size}: pad them first")
    return sizes


#: The large columns that the responses of a prompt share.
SHARED = ("multi_modal_inputs",)


def store(
    plane: Plane,
    tensors: Mapping[str, Any] | None,
    others: Mapping[str, npt.NDArray[Any]],
    rows: int,
    *,
    dedupe: Collection[str] = (),
    scope: str | None = None,
    timeout: float = 60.0,
) -> ProtoColumns:
    """Put the columns of a DataProto; of those named in `dedupe`, equal rows are stored once.

    Raises SchemaMismatch for an unsupported column, and as `Plane.put`.
    """
    columns: dict[str, Any] = {}
    kinds: dict[str, Kind] = {}
    handles: dict[str, Sequence[Any]] = {}
    for name, tensor in (tensors if tensors is not None else {}).items():
        columns[name], kinds[name] = tensor, "tensor"
    for name, array in others.items():
        if name in kinds:
            raise SchemaMismatch(f"column {name!r} is in batch and in non_tensor_batch: rename one", column=name)
        kinds[name] = _kind(name, array, dedupe)
        if kinds[name] == "rows" and any(isinstance(row, LazyRow) for row in array):
            handles[name] = array.tolist()
        else:
            columns[name] = _stored(array, kinds[name])
    once = [name for name in columns if name in dedupe]
    ref = plane.put(columns, scope=scope, dedupe=once, timeout=timeout) if columns else None
    made = ref
    try:
        for name, values in handles.items():
            more = _of_handles(plane, name, values, scope, timeout)
            ref = more if ref is None else ref.union(more)
    except BaseException:
        if made is not None and scope is None:  # no other code can free the stored rows
            plane.free(made)
        raise
    return ProtoColumns(None if ref is None else ref.select(*kinds), kinds, rows, tensors is not None)


def load(
    plane: Plane, columns: ProtoColumns, lazy: Collection[str] = (), *, timeout: float = 60.0, device: Any = None
) -> tuple[Any, dict[str, npt.NDArray[Any]]]:
    """The `batch` and the `non_tensor_batch` of these columns; for those in `lazy`, handles of the rows. `device`: the
    device of the tensors, if not the host.

    Raises as `Plane.get`.
    """
    tensors: dict[str, Any] = {}
    others: dict[str, npt.NDArray[Any]] = {}
    for name in lazy:
        if columns.kinds.get(name) != "rows":
            what = f"column {name!r} is no column of dicts: only those are left as handles"
            raise SchemaMismatch(what, column=name, expected="rows", found=columns.kinds.get(name, "not there"))
    read = [name for name in columns.kinds if name not in lazy]
    batch: Batch | dict[str, Column] = {}
    if columns.ref is not None and read:
        batch = plane.get(columns.ref.select(*read), timeout=timeout, device=device)
    for name, kind in columns.kinds.items():
        if name in lazy and columns.ref is not None:
            others[name] = objects_of(lazy_rows(columns.ref, name))
        elif kind == "tensor":
            tensors[name] = batch[name].torch()
        else:
            others[name] = _loaded(batch[name], kind)
    return TensorDict(tensors, batch_size=[columns.rows]) if columns.tensors else None, others


def _kind(name: str, array: npt.NDArray[Any], dedupe: Collection[str]) -> Kind:
    if array.dtype.kind == "O":
        if array.ndim > 1:
            return "table"
        of_rows = [row is None or _is_row(row) for row in array]
        return "rows" if all(of_rows) and (name in dedupe or any(row is not None for row in array)) else "objects"
    if array.dtype.kind in "US" and array.ndim == 1:
        return "text"
    return "array" if array.dtype.kind in "biufcmM" else "stack"


def _is_row(value: object) -> bool:
    """Whether the value is returned as an equal dict: one of a class of its own is an object."""
    return isinstance(value, Mapping) and (type(value) is dict or not isinstance(value, dict))


def _stored(array: npt.NDArray[Any], kind: Kind) -> Any:
    if kind == "rows":
        return encoded(array.tolist())
    if kind == "objects":
        return [(value,) for value in array.tolist()]  # one tuple for each row forces objects
    if kind == "table":
        return [(row.ravel().tolist(), row.shape) for row in array]
    if kind == "stack":
        return [(np.asarray(row),) for row in array]
    return array


def _loaded(column: Column, kind: Kind) -> npt.NDArray[Any]:
    if kind == "rows":
        return objects_of(read_rows(column) if len(column) else [])
    if kind == "objects":
        return objects_of([value for (value,) in column.to_list()])
    if kind == "table":
        rows = [objects_of(values).reshape(shape) for values, shape in column.to_list()]
        return np.stack(rows) if rows else objects_of([])
    if kind == "stack":
        stacked = [value for (value,) in column.to_list()]
        return np.stack(stacked) if stacked else objects_of([])
    if kind == "text":
        return np.array(column.to_list(), np.bytes_ if column.kind == "bytes" else np.str_)
    array: npt.NDArray[Any] = np.array(column.numpy())
    return array


def _of_handles(plane: Plane, name: str, values: Sequence[Any], scope: str | None, timeout: float) -> BatchRef:
    """References to the rows: a handle has one; a plain value is put first."""
    there = [value.ref.rename({value.column: name}) for value in values if isinstance(value, LazyRow)]
    here = [row for row, value in enumerate(values) if not isinstance(value, LazyRow)]
    order = np.empty(len(values), np.int64)
    order[[row for row, value in enumerate(values) if isinstance(value, LazyRow)]] = np.arange(len(there))
    order[here] = len(there) + np.arange(len(here))
    if here:
        put = {name: encoded([values[row] for row in here])}
        there.append(plane.put(put, scope=scope, timeout=timeout))
    ref = concat(there)
    return ref[order] if here else ref
