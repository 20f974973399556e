"""`RemoteList`: a list whose tensors are in the plane. It is pickled in a few hundred bytes, and an item is read from
the memory of the host at its first access.

    there = RemoteList.of("sequences", sequences, ledger)     # as long as the list, sliced as lists are, pickled small
    there[3]                                                  # the item as it was, its tensors in place

It replaces a list of tensors, of Experiences, or of anything else of equal length in OpenRLHF. Columns are read at the
first access to an item, all in one request; inputs of a vision-language model stay in the plane, and their handles
(`integrations.rows`) read them at the first access.

Invariants: it keeps nothing alive; an item has its original types, shapes and dtypes, its tensors are writable and
private to this process, and pin their bytes; a slice is a list of the same rows and copies no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, overload

from dataplane.batch.batch import Column
from dataplane.batch.object_codec import decode_row
from dataplane.batch.ref import BatchRef
from dataplane.errors import Misuse
from dataplane.integrations.openrlhf.ledger import Ledger
from dataplane.integrations.openrlhf.outline import REST, Inputs, Node, Outline, Outliner, Placeholder, places, rebuilt
from dataplane.integrations.process import plane as plane_of_process
from dataplane.integrations.rows import LazyRow


class RemoteList(Sequence[Any]):
    """`len(there)` items. Picklable; any thread may access it, one at a time."""

    def __init__(self, outlines: Sequence[Outline], columns: Mapping[str, BatchRef]) -> None:
        """Not for callers: `of` creates them. The arguments are not checked."""
        self._outlines = tuple(outlines)
        self._columns = columns
        self._read: dict[str, Column] = {}

    @classmethod
    def of(cls, name: str, items: Sequence[Any], ledger: Ledger, *, strict: bool = False) -> RemoteList:
        """A list of these items, called `name`; tensors that the ledger does not know are put.

        Raises as `Plane.put`; with `strict`, SchemaMismatch for a part that no column represents, which otherwise
        stays in the list.
        """
        outliner = Outliner(strict=strict)
        outlines = [outliner.outline(name, item) for item in items]
        return cls(outlines, ledger.place(outliner.found))

    @property
    def refs(self) -> list[BatchRef]:
        """The references to its columns, as few as possible."""
        return _merged(self._columns)

    def __len__(self) -> int:
        return len(self._outlines)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> RemoteList: ...
    def __getitem__(self, index: int | slice) -> Any:
        """An item, read, or the list of a slice."""
        chosen = range(len(self))[index]
        return self._slice(chosen) if isinstance(chosen, range) else self.item(chosen)

    def __iter__(self) -> Iterator[Any]:
        return map(self.item, range(len(self)))

    def item(self, index: int, fields: Collection[str] | None = None, *, lazy: bool = True, device: Any = None) -> Any:
        """An item. Of an Experience only these fields; the others have the values of a new one. Inputs as handles if
        `lazy`. Columns that are read first with this call are read to the `device`, and stay there.

        Raises as `Plane.get`.
        """
        outline = self._outlines[index] if fields is None else _only(self._outlines[index], fields)
        self._fetch({place.column for place in places(outline) if isinstance(place, Placeholder)}, device)
        next_row = dict(self._starts[index])

        def take(place: Placeholder | Inputs) -> Any:
            first, rows = next_row[place.column], place.rows if isinstance(place, Placeholder) else 1
            next_row[place.column] = first + rows
            if isinstance(place, Placeholder):
                return _value(place, self._read[place.column][first : first + rows])
            ref = self._columns[place.column][first]
            row = LazyRow(ref, ref.columns[0])
            return row if lazy else row.read()

        return rebuilt(outline, take)

    def __repr__(self) -> str:
        return f"RemoteList({len(self)} items, {self.refs!r})"

    def __reduce__(self) -> tuple[Callable[..., RemoteList], tuple[Any, ...]]:
        inputs = {place.column for each in set(self._outlines) for place in places(each) if isinstance(place, Inputs)}
        merged = _merged({name: ref for name, ref in self._columns.items() if name not in inputs})
        named = {name: self._columns[name] for name in sorted(inputs & self._columns.keys())}
        return _arrived, (self._outlines, merged, named)

    def _fetch(self, names: set[str], device: Any) -> None:
        """Read these columns: one request for all of equal length."""
        for ref in _merged({name: self._columns[name] for name in names - self._read.keys()}):
            self._read.update(plane_of_process().get(ref, device=device).items())

    @cached_property
    def _starts(self) -> list[dict[str, int]]:
        """For each item, and the end, the first row of each column."""
        starts = [dict.fromkeys(self._columns, 0)]
        for outline in self._outlines:
            at = dict(starts[-1])
            for place in places(outline):
                at[place.column] += place.rows if isinstance(place, Placeholder) else 1
            starts.append(at)
        return starts

    def _slice(self, chosen: range) -> RemoteList:
        if chosen.step != 1:
            raise Misuse("items of a list that is elsewhere are taken one by one or by a slice of step 1")
        begin, end = self._starts[chosen.start], self._starts[max(chosen.start, chosen.stop)]
        columns = {name: ref[begin[name] : end[name]] for name, ref in self._columns.items() if begin[name] < end[name]}
        return RemoteList(self._outlines[chosen.start : chosen.stop], columns)


def _arrived(outlines: Sequence[Outline], merged: Sequence[BatchRef], inputs: Mapping[str, BatchRef]) -> RemoteList:
    columns = {name: ref.select(name) for ref in merged for name in ref.columns}
    return RemoteList(outlines, columns | dict(inputs))


def _merged(columns: Mapping[str, BatchRef]) -> list[BatchRef]:
    """References of one column each as references of several, side by side if they are equally long."""
    by_rows: dict[int, BatchRef] = {}
    alone = []
    for name, ref in columns.items():
        if ref.columns != (name,):  # inputs keep the name under which they were put
            alone.append(ref)
        else:
            by_rows[len(ref)] = by_rows[len(ref)].union(ref) if len(ref) in by_rows else ref
    return [*by_rows.values(), *alone]


def _only(outline: Outline, fields: Collection[str]) -> Outline:
    """The outline of an Experience with only these fields."""
    if not isinstance(outline, Node) or REST not in outline.keys:
        raise Misuse("fields are chosen of an Experience")
    kept = [(key, part) for key, part in zip(outline.keys, outline.parts, strict=True) if key in fields or key == REST]
    return Node(outline.kind, tuple([key for key, _ in kept]), tuple([part for _, part in kept]))


def _value(place: Placeholder, column: Column) -> Any:
    """The part of a placeholder: these rows of its column."""
    if column.kind == "bytes":
        return decode_row(column.name, column.numpy()[0])
    flat = column.torch() if column.kind == "dense" else column.packed()[0]
    if place.shape is not None:
        return flat.view(place.shape)
    return flat if column.kind == "dense" else flat.view(place.rows, -1)
