"""Two options of a put: `narrow` stores columns of integers in the narrowest dtype that holds them, chosen for each
stored block; `objects="refuse"` refuses object columns.

Routing indices of a mixture of experts are usually below 256, but are given as int64, 8 bytes each. The stored dtype's
name includes the given one ("int64:uint8", see `batch.dtypes`). So blocks of different widths are one column. A reader
gets int64 again, or the stored values by `Column.narrow`.

Invariants: each value is stored exactly; a column of other values than integers is not changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.batch.dedupe import Each
from dataplane.batch.dtypes import is_integer, storage
from dataplane.batch.field import Field
from dataplane.batch.put_plan import columns_of, values_of
from dataplane.batch.ref import BatchRef
from dataplane.batch.values import (
    Joined,
    Rectangle,
    RowRun,
    RowSource,
    Values,
    as_bytes,
    bounds_of,
    mismatch,
    mismatch_in,
)
from dataplane.errors import Misuse, SchemaMismatch

Narrow = bool | str | Collection[str]
"""True: all columns of integers. One name or several: these columns. Of a struct, the keys with integers are narrowed.
"""

#: The dtypes to store values in; the first that holds all values is used. Signed dtypes are before unsigned ones of the
#: same size, since torch supports few operations for uint16 and uint32. The exception is uint8.
_CHOICES = ("uint8", "int8", "int16", "uint16", "int32", "uint32")
_PIECE = 4 << 20  # bytes that one call reads

Array = npt.NDArray[Any]


def narrowed(columns: Any, narrow: Narrow, each: Each = map) -> Mapping[str, Values]:
    """The columns, with those that `narrow` names narrowed. `each`: as for `put_plan.plan`. Raises SchemaMismatch for
    an invalid column, and a name of no column or of one without integers; Misuse for an invalid `narrow`."""
    names = _names(narrow)
    found: dict[str, Values] = {}
    for name, values in columns_of(columns):
        if names is not None and name not in names:
            found[name] = values
            continue
        if names is not None and not _has_integers(values):
            raise mismatch(name, "there are no integers to narrow", expected="integers", found=repr(values.field))
        found[name] = _narrowed(values, each)
    for name in names or ():
        if name not in found:
            there = ", ".join(found)
            raise mismatch(name, f"to be narrowed, but there are only {there}", expected=there, found=name)
    return found


def _names(narrow: Narrow) -> tuple[str, ...] | None:
    """The names, or None for all columns. Raises Misuse."""
    if narrow is True:
        return None
    names = (narrow,) if isinstance(narrow, str) else narrow
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise Misuse(f"narrow is True, or the names of columns, not {narrow!r:.100}")
    return tuple(names)


def _has_integers(values: Values) -> bool:
    return is_integer(values.field.dtype) or any(map(_has_integers, values.children))


def _narrowed(values: Values, each: Each) -> Values:
    if values.children:
        children = tuple([_narrowed(child, each) for child in values.children])
        fields = zip(values.field.children, children, strict=True)
        field = msgspec.structs.replace(
            values.field, children=tuple([(key, child.field) for (key, _), child in fields])
        )
        return msgspec.structs.replace(values, field=field, children=children)
    field, source = values.field, values.data
    if source is None or not is_integer(field.dtype) or ":" in field.dtype:
        return values
    wide = storage(field.dtype)
    arrays = list(source.rows) if isinstance(source, Joined) else [source.run().view(wide)]
    dtype = _choice(arrays, wide, each)
    if dtype is None:
        return values
    name = f"{field.dtype}:{dtype.name}"
    narrow = msgspec.structs.replace(field, dtype=name)
    made = np.empty(source.nbytes // wide.itemsize, dtype)
    _fill(made, arrays, each)
    data: RowSource
    if values.offsets is None:
        data = Rectangle(made.reshape(values.rows, *field.item_shape))
    else:
        data = RowRun(as_bytes(made), bounds_of(narrow, values.offsets))
    return msgspec.structs.replace(values, field=narrow, data=data)


def _choice(arrays: list[Array], wide: np.dtype[Any], each: Each) -> np.dtype[Any] | None:
    """The narrowest dtype that can represent all values; None if it is not narrower than `wide`."""
    ranges = list(each(_range, list(_pieces(arrays))))
    low, high = min([a for a, _ in ranges], default=0), max([b for _, b in ranges], default=0)
    for name in _CHOICES:
        dtype = np.dtype(name)
        info = np.iinfo(dtype)
        if info.min <= low and high <= info.max:
            return dtype if dtype.itemsize < wide.itemsize else None
    return None


def _range(arrays: list[Array]) -> tuple[int, int]:
    """Bounds of all values: exact if one is negative, else 0 and the smallest 2**n - 1 that is at least their
    maximum."""
    low = high = 0
    for array in arrays:
        if not array.size:
            continue
        bits = int(np.bitwise_or.reduce(array, axis=None))  # one pass; min and max are two
        if bits >= 0:
            high = max(high, (1 << bits.bit_length()) - 1)
        else:
            low, high = min(low, int(array.min())), max(high, int(array.max()))
    return low, high


def _pieces(arrays: list[Array]) -> Iterator[list[Array]]:
    """The arrays in order, in groups of about `_PIECE` bytes, large ones in parts."""
    group: list[Array] = []
    size = 0
    for array in arrays:
        if array.nbytes > _PIECE and array.ndim:
            if group:
                yield group
                group, size = [], 0
            step = max(1, _PIECE * len(array) // array.nbytes)
            yield from ([array[i : i + step]] for i in range(0, len(array), step))
            continue
        group.append(array)
        size += array.nbytes
        if size >= _PIECE:
            yield group
            group, size = [], 0
    if group:
        yield group


def _fill(out: Array, arrays: list[Array], each: Each) -> None:
    """Write the concatenated values of all arrays into `out`, whose dtype can represent all of them."""
    flat = out.reshape(-1)
    jobs, at = [], 0
    for group in _pieces(arrays):
        count = sum(array.size for array in group)
        jobs.append((flat[at : at + count], group))
        at += count

    def write(job: tuple[Array, list[Array]]) -> None:
        target, group = job
        for array in group:
            part, target = target[: array.size], target[array.size :]
            np.copyto(part.reshape(array.shape), array, casting="unsafe")

    list(each(write, jobs))


Objects = Literal["store", "refuse"]
"""Whether a column that would be stored as objects is stored, or refused."""


def refuses(objects: Any) -> bool:
    """Whether object columns are refused. Raises Misuse for another value."""
    if objects not in ("store", "refuse"):
        raise Misuse(f'objects is "store" or "refuse", not {objects!r:.100}')
    return bool(objects == "refuse")


def without_objects(columns: Any) -> BatchRef | Mapping[str, Values]:
    """The columns, or the reference. Raises SchemaMismatch for an invalid column, and for objects in any column."""
    if isinstance(columns, BatchRef):
        for name, field in columns.schema.items():
            _refuse_objects(name, field, None)
        return columns
    found = dict(columns_of(columns))
    for name, values in found.items():
        _refuse_objects(name, values.field, columns[name] if isinstance(columns, Mapping) else None)
    return found


def _refuse_objects(name: str, field: Field, given: Any) -> None:
    for key, child in field.children:
        _check_key(name, key, child, given)
    if field.kind != "object":
        return
    rows = _rows_of(given)
    expected = "numbers, text, bytes or dicts, of one type in all rows"
    if rows is None or not len(rows):
        hint = "" if rows is None else ": it has no rows to say what they are, so put np.empty((0, ...), dtype)"
        raise mismatch(name, f"it would be stored as objects{hint}", expected=expected, found="objects")
    row = _spoiler(name, rows)
    found = _type_name(rows[row])
    among = f" among {_type_name(rows[0])}" if row and _type_name(rows[0]) != found else ""
    wide = " beyond 64 bits" if isinstance(rows[row], int) and not -(1 << 63) <= rows[row] < 1 << 64 else ""
    message = f"{found}{among}{wide}: the column would be stored as objects, which have no tensor"
    raise mismatch(name, message, row=row, expected=expected, found=found)


def _check_key(name: str, key: str, field: Field, given: Any) -> None:
    """Raises SchemaMismatch if a key of a struct is of objects, with the row's number in the whole column."""
    if isinstance(given, Mapping):
        _refuse_objects(f"{name}.{key}", field, given.get(key))
        return
    rows = _rows_of(given)
    if rows is None or not all(isinstance(row, Mapping) for row in rows):
        _refuse_objects(f"{name}.{key}", field, None)
        return
    having = [i for i, row in enumerate(rows) if key in row]
    try:
        _refuse_objects(f"{name}.{key}", field, [rows[i][key] for i in having])
    except SchemaMismatch as error:
        raise mismatch_in(error, error.column, having) from None


def _rows_of(given: Any) -> Sequence[Any] | None:
    """The rows as Python values; None if `given` is no array or sequence."""
    if isinstance(given, np.ndarray):
        return list(given)
    if hasattr(given, "to_pylist"):  # of Arrow
        rows: list[Any] = given.to_pylist()
        return rows
    return given if isinstance(given, Sequence) and not isinstance(given, str | bytes) else None


def _spoiler(name: str, rows: Sequence[Any]) -> int:
    """The number of the first row that makes the column objects."""
    low, high = 0, len(rows)  # the first `low` rows alone are no object column, the first `high` are
    while high - low > 1:
        middle = (low + high) // 2
        if values_of(name, list(rows[:middle])).field.kind == "object":
            high = middle
        else:
            low = middle
    return high - 1


def _type_name(row: Any) -> str:
    """The type of a row, in a few words."""
    if isinstance(row, list | tuple):
        inner = ", ".join(sorted({type(item).__name__ for item in row}))
        return f"{type(row).__name__} of {inner}" if inner else f"an empty {type(row).__name__}"
    if row is None:
        return "None"
    dtype = getattr(row, "dtype", None)
    shape = getattr(row, "shape", None)
    kind = type(row).__name__
    return kind if dtype is None or shape is None else f"{kind} of {dtype}, {len(shape)}-d"
