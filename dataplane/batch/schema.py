"""Fields of several batches brought together: what a column is after its parts from here and there are one.

A ragged column keeps a dimension's size only while every part has that same size; the dimensions that vary
come first, so one that varies makes all before it vary too. A struct has the keys of every part, since a row
may lack any of them. Everything else has to be equal.
"""

from __future__ import annotations

from collections.abc import Iterable

from dataplane.batch.field import Field
from dataplane.errors import SchemaMismatch


def merge_fields(name: str, fields: Iterable[Field]) -> Field:
    """The field of a column whose parts have these fields, at least one. Raises SchemaMismatch, naming the column."""
    merged: Field | None = None
    for field in fields:
        if merged is None:
            merged = field
        elif field is not merged and field != merged:
            merged = _merge(name, merged, field)
    if merged is None:
        raise ValueError(f"column {name!r} has no parts")
    return merged


def _merge(name: str, ours: Field, theirs: Field) -> Field:
    if ours == theirs:
        return ours
    if ours.kind == theirs.kind == "struct":
        keys = dict(ours.children)
        for key, field in theirs.children:
            keys[key] = _merge(f"{name}.{key}", keys[key], field) if key in keys else field
        return Field("struct", children=tuple(keys.items()))
    alike = ours.kind == theirs.kind and ours.dtype == theirs.dtype and len(ours.shape) == len(theirs.shape)
    if not alike or ours.kind != "ragged":
        raise SchemaMismatch(
            f"column {name!r} is {ours!r} in one batch and {theirs!r} in another",
            column=name,
            expected=repr(ours),
            found=repr(theirs),
        )
    pairs = enumerate(zip(ours.shape, theirs.shape, strict=True))
    varying = max(axis + 1 for axis, (a, b) in pairs if a != b or a is None)
    return Field("ragged", ours.dtype, (None,) * varying + ours.shape[varying:])
