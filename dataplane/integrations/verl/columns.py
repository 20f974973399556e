"""`Columns`: the content of a DataProto without its meta_info, as a reference with the kind of each column.

Immutable and small. All operations of verl on the rows and columns of a DataProto are applied to the reference, in
the same order and with the same result; no bytes are moved and no node is asked. A tensor column and another column
must have different names, as in a TensorDict with both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from dataplane.batch.concat import concat
from dataplane.batch.ref import BatchRef
from dataplane.batch.rows import Selector
from dataplane.errors import Misuse, SchemaMismatch

#: What a column was: of the tensors; a NumPy array of numbers; one of text; an object array of dicts of tensors, or
#: None, a row; one of anything else; one of several dimensions; an array of records, or of text in several dimensions.
Kind = Literal["tensor", "array", "text", "rows", "objects", "table", "stack"]


@dataclass(frozen=True, slots=True)
class Columns:
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

    def take(self, rows: Selector) -> Columns:
        """The rows selected by a slice, or by a list, array or tensor of positions or flags."""
        if self.ref is None:
            return replace(self, rows=len(np.arange(self.rows)[_plain(rows)]))
        ref = self.ref[rows]
        return replace(self, ref=ref, rows=len(ref))

    def repeat(self, times: int) -> Columns:
        """Each row `times` times in succession."""
        ref = None if self.ref is None else self.ref.repeat(times)
        return replace(self, ref=ref, rows=self.rows * times)

    def split(self, sizes: Sequence[int]) -> list[Columns]:
        """Consecutive parts of these sizes."""
        refs = [None for _ in sizes] if self.ref is None else self.ref.split(sizes)
        return [replace(self, ref=ref, rows=size) for ref, size in zip(refs, sizes, strict=True)]

    # columns

    def select(self, names: Sequence[str]) -> Columns:
        """These columns, in this order."""
        if self.ref is None or not names:
            if names:
                raise SchemaMismatch(f"there is no column {names[0]!r}; there are none", column=names[0])
            return replace(self, ref=None, kinds={})
        return replace(self, ref=self.ref.select(*names), kinds={name: self.kinds[name] for name in names})

    def drop(self, names: Sequence[str]) -> Columns:
        """All columns but these."""
        return self.select([name for name in self.kinds if name not in names])

    def rename(self, names: Mapping[str, str]) -> Columns:
        """The same columns, renamed by this mapping of old to new names."""
        if self.ref is None:
            return self.select(list(names))
        kinds = {names.get(name, name): kind for name, kind in self.kinds.items()}
        return replace(self, ref=self.ref.rename(names), kinds=kinds)

    def beside(self, other: Columns) -> Columns:
        """The columns of both, side by side; for a name in both, the other's column."""
        if other.ref is None:
            return replace(self, tensors=self.tensors or other.tensors)
        mine = self.drop([name for name in other.kinds if name in self.kinds])
        if mine.ref is None and (mine.tensors or self.kinds) and mine.rows != other.rows:
            what = f"columns of {other.rows} rows do not fit beside {mine.rows} rows"
            raise SchemaMismatch(what, column=next(iter(other.kinds)), expected=f"{mine.rows} rows")
        ref = other.ref if mine.ref is None else mine.ref.union(other.ref)
        return Columns(ref, {**mine.kinds, **other.kinds}, other.rows, self.tensors or other.tensors)


def concatenated(several: Sequence[Columns]) -> Columns:
    """The rows of each after those of the one before, in the columns of the first. All have the same columns.

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


def _plain(rows: Any) -> Any:
    """A selector of references as one of NumPy."""
    plain: Callable[[], Any] | None = getattr(rows, "numpy", None)
    return rows if plain is None else plain()
