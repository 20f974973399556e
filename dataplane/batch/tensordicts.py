"""TensorDicts in and out. tensordict is imported only when a TensorDict is put or asked for.

In: every entry is a column; a nested TensorDict is a struct. The first batch dimension counts rows. A NonTensorStack
has a value for each row. A NonTensorData has one value for all rows, unless its data is a list, an array or a tensor:
then the data has a value for each row. tensordict itself stores arrays in this way that it cannot convert to a tensor,
and its `data[name]` returns one value for each row. Rows of a lazy stack may differ in shape. If they differ in their
keys, the stack shows only the keys that all rows have. Such a stack becomes a struct of all keys if it is nested, and
is refused if it is the whole batch.

Out: `stacked` makes one entry of a value for each row, as TransferQueue does. No value is converted: rows of several
dtypes are a NonTensorStack.

`NonTensorData(value)` takes 10 microseconds, and verl gets thousands at a time. Instances differ only in one attribute,
the value. So tensordict creates one, and the others are made by copying its attributes (`stack_of`). They share nothing
mutable. If an instance of tensordict has any other state, its constructors are called for each row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from dataplane.batch import tensors
from dataplane.batch.dtypes import name_of
from dataplane.batch.infer import infer
from dataplane.batch.values import Values, dense, mismatch, struct

_STACK, _SINGLE = "NonTensorStack", ("NonTensorData", "MetaData")


def is_tensordict(value: object) -> bool:
    """Whether the value is a TensorDict, a tensorclass, or a container of values that are not tensors."""
    test = getattr(sys.modules.get("tensordict"), "is_tensor_collection", None)
    return test is not None and bool(test(value))


def is_non_tensor(value: object) -> bool:
    """Whether the value is a TensorDict's container of values that are not tensors."""
    return type(value).__name__ in (_STACK, *_SINGLE) and is_tensordict(value)


def entries_of(batch: Any, column: str = "") -> Iterator[tuple[str, Any]]:
    """The names and entries. In a lazy stack, an entry whose rows differ in shape is a list of the rows' tensors.

    Raises SchemaMismatch without a batch dimension, or if rows of a lazy stack differ in their entries.
    """
    if not len(batch.batch_size):
        raise mismatch(
            column, "a TensorDict without a batch dimension has no rows", expected="a batch size", found="()"
        )
    if type(batch).__name__ == "TensorDict":
        yield from batch.items()
        return
    lazy = list(batch.unbind(0)) if _is_lazy(batch) else []
    for number, row in enumerate(lazy):
        if other := set(row.keys()) ^ set(lazy[0].keys()):
            found = f"a lazy stack of which some rows have {', '.join(map(repr, sorted(map(str, other))))}, others not"
            hint = "give all rows the same entries, or put a list of a dict for each row as one column"
            raise mismatch(column, f"{found}: {hint}", row=number, expected="rows of the same entries", found=found)
    for name in batch.keys():  # noqa: SIM118  # iteration over a TensorDict is over its rows
        each = [row.get(name) for row in lazy]
        ragged = each and all(map(tensors.is_tensor, each)) and len({one.shape for one in each}) > 1
        yield name, each if ragged else batch.get(name)


def columns_of(batch: Any, column: str = "") -> Iterator[tuple[str, Values]]:
    """The names of the entries, and the entries as columns. Raises SchemaMismatch."""
    for name, entry in entries_of(batch, column):
        yield name, values_of(f"{column}.{name}" if column else name, entry)


def values_of(column: str, entry: Any) -> Values:
    """One entry as a column. Raises SchemaMismatch if it forms none."""
    if isinstance(entry, list) or (_is_lazy(entry) and len({frozenset(row.keys()) for row in entry.unbind(0)}) > 1):
        return infer(column, rows_of(column, entry))
    if not is_tensordict(entry):
        return tensors.values_of(column, entry)
    if is_non_tensor(entry):
        found = rows_of(column, entry)
        if tensors.is_tensor(found):
            return tensors.values_of(column, found)
        if isinstance(found, np.ndarray) and name_of(found.dtype) is not None:
            return dense(column, found)
        return infer(column, list(found))
    pairs = list(columns_of(entry, column))
    rows = int(entry.batch_size[0])
    present = [np.ones(rows, np.bool_)] * len(pairs)
    return struct([name for name, _ in pairs], present, [values for _, values in pairs], rows)


def rows_of(column: str, entry: Any) -> Any:
    """A value for each row of an entry: a list, an array or a tensor of them. Rows of a TensorDict are dicts.

    Raises SchemaMismatch if the counts of values and rows differ.
    """
    if isinstance(entry, list) or tensors.is_tensor(entry):
        return entry
    if type(entry).__name__ == _STACK:
        return _values_of_stack(entry)
    if is_non_tensor(entry):
        return _rows_of_data(column, entry.data, entry.batch_size)
    rows = int(entry.batch_size[0])
    if _is_lazy(entry) or not isinstance(entry, Mapping):
        return [row.to_dict() for row in entry.unbind(0)]
    columns = {name: rows_of(f"{column}.{name}", each) for name, each in entries_of(entry, column)}
    if not columns:
        return [{} for _ in range(rows)]
    values = [each.unbind() if tensors.is_tensor(each) else each for each in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]


def _is_lazy(entry: Any) -> bool:
    """Whether the entry is a lazy stack, which keeps its TensorDicts separate."""
    return type(entry).__name__ == "LazyStackedTensorDict"


def _rows_of_data(column: str, data: Any, sizes: Sequence[int]) -> Any:
    """A value for each row of a NonTensorData with this data and batch size. Raises SchemaMismatch."""
    several = type(data) is list or (hasattr(data, "ndim") and data.ndim > 0 and hasattr(data, "dtype"))
    if not several:
        if len(sizes):
            return [data] * int(sizes[0])
        found = f"a NonTensorData without a batch size, of a {type(data).__name__}"
        raise mismatch(column, f"{found}, has no rows", expected="a batch size", found=found)
    if len(sizes) and len(data) != sizes[0]:
        expected, found = f"{sizes[0]} values", f"a {type(data).__name__} of {len(data)} values"
        hint = f"give one for each row, or NonTensorStack(*[value] * {sizes[0]}) where all rows have the whole of it"
        raise mismatch(column, f"{found} for {sizes[0]} rows: {hint}", expected=expected, found=found)
    return data


def stacked(rows: Sequence[Any]) -> Any:
    """A value for each row as one entry. Tensors of one dtype are a tensor [rows] if they have no dimensions, else a
    nested tensor of the jagged layout, or of the strided one if that fails. Other values are a NonTensorStack. Imports
    tensordict."""
    if rows and all(map(tensors.is_tensor, rows)) and len({row.dtype for row in rows}) == 1:
        import torch

        if all(not row.ndim for row in rows):
            return torch.stack(list(rows))
        for layout in (torch.jagged, torch.strided):
            try:
                return torch.nested.as_nested_tensor(list(rows), layout=layout)
            except (RuntimeError, TypeError):  # raised by torch if the rows have no such layout
                continue
    return stack_of(rows)


def build(tensors: Mapping[str, Any], others: Mapping[str, Sequence[Any]], rows: int) -> Any:
    """A TensorDict of the batch size [rows]: tensors [rows, ...], and lists of a value for each row. Imports
    tensordict."""
    from tensordict import TensorDict

    stacks = {name: stack_of(values) for name, values in others.items()}
    return TensorDict({**tensors, **stacks}, batch_size=[rows])


_DATA, _OWN, _OTHERS, _ROWS, _SIZE = "data", "_tensordict", "_non_tensordict", "tensordicts", "_batch_size"


def stack_of(rows: Sequence[Any]) -> Any:
    """A NonTensorStack of these values, one for each row. Imports tensordict."""
    return _maker()(rows)


def _values_of_stack(stacked: Any) -> list[Any]:
    """The value of each row of a NonTensorStack, as its `tolist` gives it."""
    if _maker().__name__ == _COPYING:
        own = vars(stacked)
        rows = [vars(each) for each in own[_ROWS]] if own["stack_dim"] == 0 else []
        if rows and all(row.keys() == _named().keys() and not vars(row[_OWN])[_SIZE] for row in rows):
            return [row[_OTHERS][_DATA] for row in rows]
    listed: list[Any] = stacked.tolist()
    return listed


@lru_cache(maxsize=1)
def _named() -> dict[str, Any]:
    """The attributes of a NonTensorData."""
    from tensordict import NonTensorData

    return vars(NonTensorData(None))


_COPYING = "by_copying"


@lru_cache(maxsize=1)
def _maker() -> Callable[[Sequence[Any]], Any]:
    from tensordict import NonTensorData, NonTensorStack

    def by_constructors(rows: Sequence[Any]) -> Any:
        return NonTensorStack(*map(NonTensorData, rows))

    one, several = NonTensorData(None), by_constructors([None, None])
    return _copying(one, several) if _is_simple(one, several) else by_constructors


def _copying(one: Any, several: Any) -> Callable[[Sequence[Any]], Any]:
    """A function that makes a stack like `several` of these values, in rows like `one`."""
    import torch

    new, kind, inner_kind, stack_kind = object.__new__, type(one), type(vars(one)[_OWN]), type(several)
    of_one, of_inner, of_stack = dict(vars(one)), dict(vars(vars(one)[_OWN])), dict(vars(several))
    others = of_one[_OTHERS]

    def row(value: Any) -> Any:
        inner, made = new(inner_kind), new(kind)
        own = inner.__dict__
        own.update(of_inner)
        own[_OWN] = {}
        own = made.__dict__
        own.update(of_one)
        own[_OWN] = inner
        own[_OTHERS] = {**others, _DATA: value}
        return made

    def make(rows: Sequence[Any]) -> Any:
        made = new(stack_kind)
        own = made.__dict__
        own.update(of_stack)
        own[_ROWS] = list(map(row, rows))
        own[_SIZE] = torch.Size([len(rows)])
        return made

    def by_copying(rows: Sequence[Any]) -> Any:
        return make(rows) if len(rows) else stack_kind()

    return by_copying


def _is_simple(one: Any, several: Any) -> bool:
    """Whether each attribute of these is immutable, or one that `_copying` makes anew."""
    try:
        of_one, of_stack = vars(one), vars(several)
        inner, others, rows = of_one[_OWN], of_one[_OTHERS], of_stack[_ROWS]
        rest = [value for name, value in of_one.items() if name not in (_OWN, _OTHERS)]
        rest += [value for name, value in of_stack.items() if name != _ROWS]
        rest += [value for name, value in vars(inner).items() if name != _OWN]
        rest += [value for name, value in others.items() if name != _DATA]
        known = vars(inner)[_OWN] == {} and type(rows) is list and len(rows) == 2 and of_stack[_SIZE] == (2,)
        plain = all(value is None or isinstance(value, bool | int | str | tuple) for value in rest)
        alike = all(vars(row).keys() == of_one.keys() and vars(row)[_OTHERS] == others for row in rows)
        return known and plain and alike and others[_DATA] is None and not _has_slots(one, inner, several)
    except (AttributeError, KeyError, TypeError):
        return False


def _has_slots(*values: Any) -> bool:
    """Whether one of these has attributes in slots."""
    kinds = [kind for value in values for kind in type(value).__mro__ if kind is not object]
    return any(name != "__dict__" and name != "__weakref__" for kind in kinds for name in _slots(kind))


def _slots(kind: type) -> Sequence[str]:
    found = vars(kind).get("__slots__", ())
    return (found,) if isinstance(found, str) else tuple(found)
