"""Values in and out: each field of a TensorDict as a column whose rows are of several kinds, and back.

Invariants: a row is returned as it was put, independent of the other rows of the field: a tensor with its dtype and
shape, a row of a TensorDict as a dict, any other value unchanged (text, numbers, None, lists, dicts, which may contain
tensors). Tensors that were put dense are returned as a dense tensor if that was requested and the rows have one shape.
Other tensors are returned as a nested tensor, of the jagged layout if that can represent them, even if they were put in
a NonTensorStack. All other fields are returned as a NonTensorStack.

A column with rows of several kinds is a struct with a key for each kind, of which a row has one or more. The keys:
tensors put dense, `=even/<dtype>/<dimensions>`, or nested or one by one, `=ragged/<dtype>/<dimensions>`; `=text`;
`=object` for everything else; and the tensors of a dict, `.<key>/<dtype>/<dimensions>`, whose keys are in the `=object`
row, with None as the value. Dense rows are stored as ragged ones, because other puts of the field may have another
shape.

torch and tensordict are imported at their first use.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.batch import gather, object_codec, tensordicts, tensors, views
from dataplane.batch.batch import Batch, Column
from dataplane.batch.field import Field
from dataplane.batch.infer import infer
from dataplane.batch.values import Values, mismatch, mismatch_in, struct
from dataplane.errors import SchemaMismatch

Flags = npt.NDArray[np.bool_]
Part = tuple[str, Flags | None, Values]


class _Variant(NamedTuple):
    """Rows of one kind: its name, the positions of the rows in the column, and the rows."""

    name: str
    present: Flags
    column: Column


def variants_of(parts: Sequence[Part], rows: int) -> Values:
    """A column whose rows are of several kinds. Each part has the name of its kind, a flag for each row of the column
    that says whether the row is of this kind (None: all are), and the values of those rows."""
    flags = [np.ones(rows, np.bool_) if present is None else present for _, present, _ in parts]
    return struct([name for name, _, _ in parts], flags, [values for _, _, values in parts], rows)


def _variants(column: Column) -> list[_Variant]:
    """The column, split by the type of its values: one column for each type. If all rows have one type, the column is
    read in place, without a copy."""
    found = []
    for name, field in column.field.children:
        present, rows = gather.presence(column.reading, name, field)
        if present.any():
            child = Column(f"{column.name}{name}", field, rows.selections, rows.order, cut=rows.cut)
            found.append(_Variant(name, present, child))
    return found


def columns(fields: Any, rows: int) -> dict[str, Values]:
    """The fields of a TensorDict with this many rows. Fields that share the objects of all rows, as verl's `prompt`
    and `raw_prompt`, share a column. Raises SchemaMismatch for unsupported values."""
    found = {}
    seen: dict[tuple[int, ...], tuple[Any, Values]] = {}  # with the rows, so that no other objects have their identity
    for name, entry in tensordicts.entries_of(fields):
        if not isinstance(name, str):
            raise SchemaMismatch(f"a field's name is text, not {name!r}", expected="text", found=repr(name))
        given = tensordicts.rows_of(name, entry) if tensordicts.is_tensordict(entry) else entry
        if tensors.is_tensor(given):
            found[name] = column(name, given, rows)
            continue
        identity = tuple(map(id, given := list(given)))
        if identity not in seen:
            seen[identity] = given, column(name, given, rows)
        _, found[name] = seen[identity]
    return found


def column(name: str, entry: Any, rows: int) -> Values:
    """One field. Raises SchemaMismatch."""
    if tensordicts.is_tensordict(entry):
        entry = tensordicts.rows_of(name, entry)
    if tensors.is_tensor(entry):
        parts = [_nested(name, entry) if entry.is_nested else _even(name, entry)]
    else:
        parts = list(_others(name, [each.tolist() if tensordicts.is_non_tensor(each) else each for each in entry]))
    if parts[0][2].rows != rows:
        expected, found = f"{rows} rows, as the batch", f"{parts[0][2].rows} rows"
        raise mismatch(name, f"{found}, not {expected}", expected=expected, found=found)
    return variants_of(parts, rows)


def _even(name: str, tensor: Any) -> Part:
    """Rows of one shape, as ragged ones: other puts may have another shape, and one column holds all of them."""
    values = tensors.values_of(name, tensor)
    own, shape = values.field, values.field.shape
    if shape:
        offsets = np.arange(values.rows + 1, dtype=np.int64) * cast("int", shape[0])
        kept = Field("ragged", own.dtype, (None, *shape[1:]))
        values = msgspec.structs.replace(values, field=kept, offsets=offsets)
    return f"=even/{own.dtype}/{len(shape)}", None, values


def _nested(name: str, tensor: Any) -> Part:
    values = tensors.values_of(name, tensor)
    return f"=ragged/{values.field.dtype}/{len(values.field.shape)}", None, values


def _others(name: str, values: Sequence[Any]) -> Iterator[Part]:
    """Values that are not one tensor of all rows: text, the tensors of dicts, and the rest as objects."""
    if set(map(type, values)) == {str}:
        yield "=text", None, infer(name, values)
        return
    if tensors.alike(values):
        yield f"=ragged/{str(values[0].dtype)[6:]}/{values[0].ndim}", None, tensors.values_of_rows(name, values)
        return
    plain: list[Any] = []
    held: defaultdict[str, list[tuple[int, Any]]] = defaultdict(list)
    for row, value in enumerate(values):
        rest = value
        if type(value) is dict and any(map(tensors.is_tensor, value.values())):
            rest = {}
            for key, each in value.items():
                rest[key] = each
                if type(key) is str and tensors.is_tensor(each) and not each.is_nested:
                    held[f".{key}/{str(each.dtype)[6:]}/{each.ndim}"].append((row, each))
                    rest[key] = None  # keeps its place
        plain.append(rest)
    yield "=object", None, object_codec.values_of(name, plain)
    for kind, found in held.items():
        flags = np.zeros(len(values), np.bool_)
        flags[[row for row, _ in found]] = True
        yield kind, flags, tensors.values_of_rows(f"{name}{kind}", [each for _, each in found])


def tensordict(batch: Batch | None, names: Sequence[str], rows: int, *, dense: bool) -> Any:
    """The fields as a TensorDict of this many rows; `dense`: tensors that were put dense stay dense."""
    from tensordict import TensorDict

    copies = object_codec.Copies()
    found = {name: field(batch[name], dense=dense, copies=copies) for name in names} if batch is not None else {}
    return TensorDict(found, batch_size=[rows])


def field(column: Column, *, dense: bool, copies: object_codec.Copies | None = None) -> Any:
    """One field: a tensor, or a NonTensorStack. `copies`: shared by fields that are read together."""
    found = _variants(column)
    if len(found) == 1 and found[0].name.startswith(("=even", "=ragged")):
        return _tensor(found[0], dense=dense)
    return tensordicts.stacked(_rows(column, found, copies))


def _tensor(found: _Variant, *, dense: bool) -> Any:
    """Rows that are all of one kind."""
    own, even = found.column, dense and found.name.startswith("=even")
    if own.field.varying == 1:
        items, offsets = own.packed()
        lengths = offsets.diff()
        if even and (lengths == lengths[:1]).all():
            return items.view(len(lengths), int(lengths[0]) if len(lengths) else 0, *items.shape[1:])
        return tensors.jagged(items, offsets)
    if not own.field.varying:
        return own.torch()
    rows = own.torch()
    if even and len({row.shape for row in rows}) == 1:
        import torch

        return torch.stack(rows)
    return tensordicts.stacked(rows)


def _rows(column: Column, found: Sequence[_Variant], copies: object_codec.Copies | None) -> list[Any]:
    """One value a row, of any kind."""
    values: list[Any] = [None] * len(column)
    for name, present, own in sorted(found, key=lambda each: each.name.startswith(".")):  # a dict's tensors last
        rows = np.flatnonzero(present).tolist()
        try:
            plain = own.kind in ("text", "object")
            each = views.python(own.name, own.field, own.reading, copies=copies) if plain else own.tensors()
        except SchemaMismatch as error:  # a class that this process does not have
            raise mismatch_in(error, column.name, rows) from error
        if name.startswith("."):
            key = name[1:].rsplit("/", 2)[0]
            for row, value in zip(rows, each, strict=True):
                values[row][key] = value
        else:
            for row, value in zip(rows, each, strict=True):
                values[row] = value
    return values


# The fields of a BatchMeta


def stored_schema(fields: Mapping[str, Field]) -> dict[str, dict[str, Any]]:
    """The fields as far as their columns tell: without the shapes of rows that differ."""
    import torch

    found = {}
    for name, own in fields.items():
        kinds = [kind for kind, _ in own.children]
        if any(not kind.startswith(("=even", "=ragged")) for kind in kinds):
            found[name] = _known(None, None, nested=False, tensor=False)
            continue
        children = [child for _, child in own.children]
        dtype = getattr(torch, children[0].dtype, None)
        scalars = all(child.kind == "dense" for child in children)
        nested = any(kind.startswith("=ragged") for kind in kinds)
        found[name] = _known(dtype, (1,) if scalars else None, nested=nested)
    return found


def _known(dtype: Any, shape: Any, *, nested: bool, tensor: bool = True) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "is_nested": nested, "is_non_tensor": not tensor}
