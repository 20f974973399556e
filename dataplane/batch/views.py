"""A column as plain Python values, NumPy arrays or torch tensors.

For dtypes that NumPy lacks, `numpy` returns the bits, as unsigned integers, and `python` the numbers. `batch.Column`
documents which results are views and which are copies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dataplane.batch import gather, object_codec, tensors
from dataplane.batch.dtypes import decoded
from dataplane.batch.field import Field, refuse
from dataplane.batch.stored_column import SelectedRows
from dataplane.batch.values import mismatch, mismatch_in, objects_of
from dataplane.device.copies import copied
from dataplane.device.memory import lent
from dataplane.errors import Misuse, SchemaMismatch

if TYPE_CHECKING:
    from dataplane.batch.batch import Column

_SMALL_ROW = 4096
"""The most bytes of an object, on average, for which rows are decoded from one copy of all. Larger rows have parts."""

#: Returns a list of an object for each row of a column; a struct's rows are made from its children's.
RowView = Callable[[str, Field, SelectedRows], list[Any]]


def numpy(name: str, field: Field, rows: SelectedRows) -> Any:
    """An array [rows, ...] for dense, text, bytes and object; a list with a value for each row for ragged and
    struct."""
    if field.kind == "dense":
        return gather.read_only(gather.dense(rows, field))
    values = numpy_rows(name, field, rows)
    return values if field.kind in ("ragged", "struct") else objects_of(values)


def numpy_rows(name: str, field: Field, rows: SelectedRows) -> list[Any]:
    """A list of a read-only array or NumPy scalar for each row; Python values for text, bytes and object."""
    if field.kind == "dense":
        return list(gather.read_only(gather.dense(rows, field)))
    if field.kind == "ragged":
        return gather.rows_of(rows, field)
    if field.kind == "struct":
        return _records(name, field, rows, numpy_rows)
    return python(name, field, rows)


def python(
    name: str, field: Field, rows: SelectedRows, *, decode: bool = True, copies: object_codec.Copies | None = None
) -> list[Any]:
    """A list of a plain Python value for each row: a number, list, str, bytes or dict, or an object as it was put.
    Without `decode`, images are dicts of bytes. `copies`: a cache shared by columns that are read in succession and
    stay in memory meanwhile."""
    if field.kind == "dense":
        values: list[Any] = decoded(field.dtype, gather.dense(rows, field)).tolist()
        return values
    if field.kind == "ragged":
        return _lists(field, rows)
    if field.kind == "struct":
        return _records(name, field, rows, partial(python, decode=decode))
    if field.kind == "text":
        return _text(name, field, rows)
    if field.kind == "bytes":
        return [row.tobytes() for row in gather.spans(rows)]
    if decode and gather.is_plain(rows) and gather.nbytes(rows, field) <= _SMALL_ROW * rows.rows:
        whole, edges, _ = gather.items(rows, field)
        return object_codec.decode_rows(name, whole.tobytes(), edges.tolist())
    copies = object_codec.Copies() if copies is None else copies
    return [
        object_codec.decode_row(name, row, lookup, decode=decode, number=number, copies=copies)
        for number, (row, lookup) in enumerate(gather.objects(rows))
    ]


def torch(name: str, field: Field, rows: SelectedRows, device: Any = None) -> Any:
    """A tensor for dense; a jagged one, or a list of tensors, for ragged; a list of dicts for struct. `device`: the
    tensors' device; None for host memory. Raises SchemaMismatch for other kinds."""
    if device is not None and (there := _there(name, field, rows, device)) is not None:
        return there
    if field.kind == "dense":
        return _tensor(name, field.dtype, gather.dense(rows, field, private=device is None), device)
    if field.kind == "ragged" and field.varying == 1:
        values, offsets, _ = gather.items(rows, field, private=device is None)
        edges = _tensor(name, "int64", offsets, device)
        return tensors.jagged(_tensor(name, field.dtype, values, device), edges, np.diff(offsets))
    if field.kind in ("ragged", "struct"):
        return torch_rows(name, field, rows, device)
    raise mismatch(name, f"{field.kind} is no tensor: use .to_list()", expected="numbers", found=field.kind)


def _there(name: str, field: Field, rows: SelectedRows, device: Any) -> Any:
    """The tensor over the values in place, if they are one run and on the device already; else None."""
    run = rows.run
    if run is None or field.kind not in ("dense", "ragged") or field.varying > 1:
        return None
    stored, chosen = run
    edges, unit = stored.tables.offsets, field.item_nbytes
    ends = (chosen.start, chosen.stop) if edges is None else (int(edges[chosen.start]), int(edges[chosen.stop]))
    there = stored.there(ends[0] * unit, ends[1] * unit, device)
    if there is None:
        return None
    values = tensors.shaped(there, field.dtype, (ends[1] - ends[0], *field.item_shape))
    if edges is None:
        return values
    own = edges[chosen.start : chosen.stop + 1] - ends[0]
    return tensors.jagged(values, _tensor(name, "int64", own, device), np.diff(own))


def packed(name: str, field: Field, rows: SelectedRows, device: Any = None) -> tuple[Any, Any]:
    """Two tensors: the concatenated items of a ragged column, and the offsets of its rows, one more than rows. Raises
    SchemaMismatch if rows do not vary in their first dimension only."""
    if field.kind != "ragged" or field.varying != 1:
        expected = "ragged in the first dimension of a row"
        raise mismatch(name, f"only a column that is {expected} is packed", expected=expected, found=repr(field))
    values, offsets, _ = gather.items(rows, field, private=device is None)
    return _tensor(name, field.dtype, values, device), _tensor(name, "int64", offsets, device)


def torch_rows(name: str, field: Field, rows: SelectedRows, device: Any = None) -> list[Any]:
    """A list of a tensor for each row, 0-d for a scalar; Python values for text, bytes and object."""
    if field.kind == "dense":
        return list(torch(name, field, rows, device).unbind())
    if field.kind == "ragged":
        own = None if device is not None else gather.own_rows(rows, field)
        if own is not None:
            return [tensors.from_bits(name, field.dtype, row) for row in own]
        values, offsets, shapes = gather.items(rows, field, private=device is None)
        flat, edges = _tensor(name, field.dtype, values, device), offsets.tolist()
        parts = [flat[a:b] for a, b in pairwise(edges)]
        return parts if shapes is None else [p.view(s) for p, s in zip(parts, shapes.tolist(), strict=True)]
    if field.kind == "struct":
        return _records(name, field, rows, partial(torch_rows, device=device))
    return python(name, field, rows)


def _tensor(name: str, dtype: str, array: npt.NDArray[Any], device: Any) -> Any:
    """A writable tensor over the array, or over a copy if it is read-only; with a `device`, a copy there."""
    if device is None:
        # torch warns of a read-only array
        return tensors.from_bits(name, dtype, array if array.flags.writeable else array.copy())
    return copied(tensors.from_bits(name, dtype, lent(array)), device)


def _lists(field: Field, rows: SelectedRows) -> list[Any]:
    values, offsets, shapes = gather.items(rows, field)
    values, edges = decoded(field.dtype, values), offsets.tolist()
    if shapes is None:
        flat = values.tolist()
        return [flat[a:b] for a, b in pairwise(edges)]
    spans = zip(edges[:-1], edges[1:], shapes.tolist(), strict=True)
    return [values[a:b].reshape(shape).tolist() for a, b, shape in spans]


def _text(name: str, field: Field, rows: SelectedRows) -> list[str]:
    values, offsets, _ = gather.items(rows, field)
    raw, edges = values.tobytes(), offsets.tolist()
    if raw.isascii():  # then characters are bytes, and one decoding serves all rows
        text = raw.decode("ascii")
        return [text[a:b] for a, b in pairwise(edges)]
    try:
        return [raw[a:b].decode() for a, b in pairwise(edges)]
    except UnicodeDecodeError as error:
        raise refuse(name, f"text that is not UTF-8: {error}") from error


def _records(name: str, field: Field, rows: SelectedRows, view: RowView) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = [{} for _ in range(rows.rows)]
    for key, child in field.children:
        present, inner = gather.presence(rows, key, child)
        try:
            values = view(f"{name}.{key}", child, inner)
        except SchemaMismatch as error:
            raise mismatch_in(error, error.column, np.flatnonzero(present).tolist()) from error
        if len(values) == len(records):
            for record, value in zip(records, values, strict=True):
                record[key] = value
        else:
            for i, value in zip(np.flatnonzero(present).tolist(), values, strict=True):
                records[i][key] = value
    return records


_MASKABLE = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def padded(column: Column, value: Any) -> tuple[Any, Any]:
    """A ragged column as a padded tensor [rows, longest, *item], and a mask of its elements, bool [rows, longest]. If
    more dimensions vary, both have the largest size of each. Raises SchemaMismatch if the column is not ragged, Misuse
    if its dtype has no such value."""
    if column.kind != "ragged":
        hint = "pad what is under a key, column[key]" if column.kind == "struct" else "use .to_list()"
        raise mismatch(column.name, f"{column.kind} is not padded: {hint}", expected="numbers", found=column.kind)
    import torch

    if column.field.varying > 1:
        return _padded_rows(column, value)
    values, offsets = column.packed()
    lengths = offsets.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    mask = torch.arange(longest, device=values.device) < lengths[:, None]
    made = _filled(column, (len(lengths), longest, *values.shape[1:]), value)
    bits = _MASKABLE.get(values.element_size())
    if bits is None:
        made[mask] = values
    else:  # torch does not index by a mask in all of its dtypes
        made.view(getattr(torch, bits))[mask] = values.view(getattr(torch, bits))
    return made, mask


def _padded_rows(column: Column, value: Any) -> tuple[Any, Any]:
    import torch

    rows, varying = column.torch(), column.field.varying
    largest = [max((row.shape[dim] for row in rows), default=0) for dim in range(varying)]
    made = _filled(column, (len(rows), *largest, *column.field.shape[varying:]), value)
    mask = torch.zeros((len(rows), *largest), dtype=torch.bool, device=column.device)
    for i, row in enumerate(rows):
        place = (i, *(slice(0, size) for size in row.shape[:varying]))
        made[place], mask[place] = row, True
    return made, mask


def _filled(column: Column, shape: tuple[Any, ...], value: Any) -> Any:
    """A tensor of this shape, filled with the value. Raises Misuse if the dtype has no such value."""
    import torch

    dtype = getattr(torch, column.dtype)
    try:
        two = torch.full((2,), value, dtype=dtype)  # a single element that overflows would be inf
        if not (dtype.is_floating_point or dtype.is_complex) and two[0].item() != value:  # torch has truncated it
            raise ValueError(f"it would be {two[0].item()!r}")
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise Misuse(f"column {column.name!r} of {column.dtype} can not be padded with {value!r}: {error}") from error
    return torch.full(shape, value, dtype=dtype, device=column.device)
