"""References to parts of rows: the steps that a user names, and the fields of sliced columns."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dataplane.batch import cuts
from dataplane.batch.cuts import END, MOST_RANKS, SHARE, SLICE, ZIGZAG, CutStep, Index, Number
from dataplane.batch.field import Field
from dataplane.batch.frame import ColumnPlace, place_of
from dataplane.errors import Misuse, SchemaMismatch

if TYPE_CHECKING:
    from dataplane.batch.ref import BatchRef


def slice_step(start: Any, stop: Any, rows: int) -> CutStep:
    """The step of `BatchRef.slice_rows` for `rows` rows. Raises Misuse for an invalid start or stop."""
    first = 0 if start is None else _numbers("start", start, rows)
    last = END if stop is None else _numbers("stop", stop, rows)
    return CutStep(SLICE, 0, (first, last))


def _numbers(what: str, value: Any, rows: int) -> Number:
    """An integer for all rows, or an array of one for each row. Raises Misuse."""
    try:
        if hasattr(value, "detach"):
            value = value.detach().cpu().numpy()
        if not isinstance(value, np.ndarray | list | tuple) or not np.ndim(value):
            return max(-END, min(END, operator.index(value)))
        array = np.asarray(value)
    except (TypeError, ValueError):
        raise Misuse(f"{what} is an integer, or one a row, not {value!r:.100}") from None
    if array.shape != (rows,) or (array.dtype.kind not in "iu" and rows):
        raise Misuse(f"{what} is an integer, or one a row: {rows} integers, not {array.dtype} {list(array.shape)}")
    found: Index = np.clip(array, -END, END).astype(np.int64)
    return found


def share_step(rank: Any, ranks: Any, zigzag: bool, multiple: Any) -> CutStep:
    """The step of `BatchRef.share_rows`. Raises Misuse for invalid numbers."""
    least = "2 x ranks" if zigzag else "ranks"
    try:
        own, count = operator.index(rank), operator.index(ranks)
        padded = count * (2 if zigzag else 1) if multiple is None else operator.index(multiple)
        step = CutStep(ZIGZAG if zigzag else SHARE, 0, (own, count, padded))
        cuts.check(step)
    except (TypeError, ValueError, OverflowError):
        raise Misuse(
            f"rank is 0 to ranks - 1, ranks 1 to {MOST_RANKS}, and multiple None or a multiple of {least}; "
            f"not rank={rank!r}, ranks={ranks!r}, multiple={multiple!r}"
        ) from None
    return step


def axis_of(name: str, field: Field, axis: Any) -> int:
    """The dimension of a row, counted from the first. Raises SchemaMismatch if rows lack it, Misuse for no integer."""
    try:
        axis = operator.index(axis)
    except TypeError:
        raise Misuse(f"a dimension of a row is named by its number, not {axis!r}") from None
    if field.kind == "struct" and field.children:
        found = {axis_of(f"{name}.{key}", child, axis) for key, child in field.children}
        if len(found) > 1:
            raise _unfit(name, field, f"dimension {axis} is not the same of all keys: name it from the first")
        return found.pop()
    if field.kind not in ("dense", "ragged"):
        raise _unfit(name, field, "only rows of numbers are sliced")
    dims = len(field.shape)
    if not -dims <= axis < dims:
        raise _unfit(name, field, f"axis is 0 to {dims - 1}, a dimension of a row, not {axis}")
    return int(axis) % dims


def size_of(field: Field, axis: int) -> int:
    """The length of all rows in a dimension; 0 if rows, or keys of a struct, differ."""
    if field.kind == "struct":
        sizes = {size_of(child, axis) for _, child in field.children}
        return sizes.pop() if len(sizes) == 1 else 0
    return field.shape[axis] or 0


def _unfit(name: str, field: Field, why: str) -> SchemaMismatch:
    return SchemaMismatch(f"column {name!r} is {field!r}: {why}", column=name, expected="numbers", found=repr(field))


def cut_field(name: str, field: Field, step: CutStep) -> Field:
    """The field of rows after one more step."""
    if field.kind == "struct":
        children = tuple([(key, cut_field(f"{name}.{key}", child, step)) for key, child in field.children])
        return Field("struct", children=children)
    axis, shape = step.axis, list(field.shape)
    size = shape[axis]
    if size is None:
        return field
    if not cuts.is_even((step,)):
        shape[: axis + 1] = [None] * (axis + 1)
        return Field("ragged", field.dtype, tuple(shape))
    shape[axis] = cuts.length((step,), size)
    return Field(field.kind, field.dtype, tuple(shape))


def sliced(ref: BatchRef, names: str | Sequence[str], axis: int, step: CutStep) -> BatchRef:
    """The reference with one more step for these columns, along the dimension `axis` of rows. Raises as
    `BatchRef.slice_rows`."""
    places, frames = dict(ref._columns), list(ref._frames)
    chosen: dict[tuple[int, int], dict[str, None]] = {}
    for name in [names] if isinstance(names, str) else names:
        field, frame, _ = place_of(ref._columns, name)
        chosen.setdefault((frame, axis_of(name, field, axis)), {})[name] = None
    for (number, at), together in chosen.items():
        whole = ref._frames[number]
        if at and whole.bounds is not None:
            raise Misuse(
                f"column {next(iter(together))!r} was made piece by piece: its rows are sliced along axis 0 alone"
            )
        sizes = {size_of(places[name].field, at) for name in together}
        own = step._replace(axis=at, size=sizes.pop() if len(sizes) == 1 else 0)
        for slot, name in enumerate(together):
            places[name] = ColumnPlace(cut_field(name, places[name].field, own), len(frames), slot)
        cut = cuts.added(whole.cut, own) if len(ref) else whole.cut
        frames.append(whole.pick([ref._columns[name].slot for name in together]).with_cut(cut))
    found = type(ref)(len(ref), places, tuple(frames), ref._origin, ref.traces)
    return found.select(*places)  # drops unused frames and slots


def packed_share(lengths: npt.ArrayLike, rank: int, ranks: int, *, multiple: int = 1) -> tuple[Index, Index]:
    """The part of each row in one rank's run of packed tokens: a start and a stop for each row, int64 [rows], for
    `BatchRef.slice_rows`.

    lengths: the lengths of whole rows, or of the shares that `share_rows` leaves. Each row is padded to a `multiple`.
    The rows are concatenated, and padded again so that all ranks have equally many tokens, as in Megatron-LM's sequence
    parallelism and in Ulysses. The result contains no padding. Raises Misuse for an invalid number.
    """
    try:
        own, count, unit = operator.index(rank), operator.index(ranks), operator.index(multiple)
        rows = np.asarray(lengths)
        rows = rows.astype(np.int64, casting="safe" if rows.size else "unsafe")
    except (TypeError, ValueError):
        raise Misuse("lengths are integers, one a row; rank, ranks and multiple are integers") from None
    if rows.ndim != 1 or rows.min(initial=0) < 0:
        raise Misuse("lengths are 0 or more, one a row")
    if not 1 <= count <= MOST_RANKS:
        raise Misuse(f"ranks is 1 to {MOST_RANKS}, not {count}")
    if not 0 <= own < count:
        raise Misuse(f"rank is 0 to ranks - 1, not {own} of {count}")
    if not 1 <= unit <= 1 << 40:
        raise Misuse(f"multiple is 1 to 2^40, not {unit}")
    padded = -(-rows // unit) * unit
    begins = np.cumsum(padded) - padded
    part = -(-int(padded.sum()) // count)
    start = np.clip(own * part - begins, 0, rows)
    return start, np.clip((own + 1) * part - begins, start, rows)
