"""A ragged column as one rectangle: rows filled up to the longest with a value, and which elements are theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dataplane.batch.values import mismatch
from dataplane.errors import Misuse

if TYPE_CHECKING:
    from dataplane.batch.batch import Column

_BITS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


def padded(column: Column, value: Any) -> tuple[Any, Any]:
    """Tensors [rows, longest, ...] and, of bools, [rows, longest]: as long as the longest row is in each dimension that
    varies. Raises SchemaMismatch where the column is not ragged, Misuse where its dtype has no such value."""
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
    bits = _BITS.get(values.element_size())
    if bits is None:
        made[mask] = values
    else:  # for torch can not index by a mask in all of its dtypes
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
    """A tensor of this shape, full of the value. Raises Misuse where the dtype has no such value."""
    import torch

    dtype = getattr(torch, column.dtype)
    try:
        one = torch.full((), value, dtype=dtype)
        if not (dtype.is_floating_point or dtype.is_complex) and one.item() != value:  # which torch has cut off
            raise ValueError(f"it would be {one.item()!r}")
    except (TypeError, ValueError, RuntimeError) as error:
        raise Misuse(f"column {column.name!r} of {column.dtype} can not be padded with {value!r}: {error}") from error
    return torch.full(shape, value, dtype=dtype, device=column.device)
