"""Slices inside rows: the part of each row that a reference refers to, described without the rows' lengths.

A `Cut` is a sequence of steps. A step selects a part of each row along one dimension of the row: from a start up to a
stop, as a Python slice does, or a rank's share. Its positions count in the result of the earlier steps. Each number of
a step is one for all rows, or an array of one for each row. Arrays follow the rows when these are picked, repeated or
concatenated. The reader and the owner of a row read its length from the column's tables; `spans` then computes the
selected items.

Invariants: steps of different dimensions are independent; each kind has a step that changes nothing, so that the cuts
of any two references can be combined (`joined`).

Shares are those of packed sequences in Megatron: a row counts as padded to a `multiple`, and each rank has the same
number of items. With `SHARE`, a share is one run of items. With `ZIGZAG`, the row is cut into 2 x ranks chunks, and
rank r gets chunks r and 2 x ranks - 1 - r, so that under a causal mask all ranks have equal work (ring attention, arXiv
2310.01889; the order of `get_batch_on_this_cp_rank`). The padding is always at the end of a rank's share, and not part
of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.errors import LimitExceeded

Index = npt.NDArray[np.int64]
Number = int | Index

SLICE, SHARE, ZIGZAG = 0, 1, 2
#: A stop beyond every row. `_WHOLE`: the numbers of each kind that change nothing (start, stop; rank, ranks, multiple).
END = 1 << 60
_WHOLE: dict[int, tuple[int, ...]] = {SLICE: (0, END), SHARE: (0, 1, 1), ZIGZAG: (0, 1, 2)}
_CODES = "bhiq"  # of arrays of 1, 2, 4 and 8 bytes
MAX_STEPS, MAX_ZIGZAGS = 64, 4  # each zig-zag may double the runs of a row
MOST_RANKS = 1 << 20


class CutStep(NamedTuple):
    """One step: its kind, the dimension of the row, and its numbers (start, stop; or rank, ranks, multiple). `size`:
    the length of all rows in this dimension before the step, or 0 if it is unknown; only estimates use it."""

    kind: int
    axis: int
    numbers: tuple[Number, ...]
    size: int = 0


Cut = tuple[CutStep, ...]
NOTHING: Cut = ()


def is_even(cut: Cut) -> bool:
    """Whether the cut is the same for all rows."""
    return all(type(number) is int for step in cut for number in step.numbers)


def take(cut: Cut, positions: Index | slice) -> Cut:
    if is_even(cut):
        return cut
    taken = [tuple([n if isinstance(n, int) else n[positions] for n in step.numbers]) for step in cut]
    return tuple([step._replace(numbers=numbers) for step, numbers in zip(cut, taken, strict=True)])


def added(cut: Cut, step: CutStep) -> Cut:
    """The cut followed by the step. Two slices of one dimension become one if they have no negative number. Raises
    LimitExceeded."""
    if cut and step.kind == SLICE and (cut[-1].kind, cut[-1].axis) == (SLICE, step.axis):
        (start, stop), (first, last) = cut[-1].numbers, step.numbers
        if all(int(np.min(number)) >= 0 for number in (start, stop, first, last) if np.size(number)):
            end = np.minimum(np.add(start, last), stop)
            both = (_number(np.minimum(np.add(start, first), END)), _number(np.minimum(end, END)))
            return (*cut[:-1], cut[-1]._replace(numbers=both))
    return bounded((*cut, step))


def _number(value: Any) -> Number:
    return int(value) if np.ndim(value) == 0 else np.asarray(value, np.int64)


def joined(several: Sequence[tuple[int, Cut]]) -> Cut:
    """The cut of concatenated rows, from (row count, cut) pairs. Raises LimitExceeded."""
    cut: Cut = NOTHING
    count = 0
    for rows, each in several:
        cut = _beside(count, cut, rows, each) if count else each
        count += rows
    return cut


def _beside(rows: int, cut: Cut, more: int, other: Cut) -> Cut:
    both = _embedded(cut, other)
    if both is None:
        turned = _embedded(other, cut)
        both = (turned[1], turned[0]) if turned is not None else None
    if both is None:
        both = (*cut, *map(_idle, other)), (*map(_idle, cut), *other)
    found = []
    for ours, theirs in zip(*both, strict=True):
        numbers = zip(ours.numbers, theirs.numbers, strict=True)
        size = ours.size if ours.size == theirs.size else 0
        found.append(ours._replace(numbers=tuple([_both(rows, a, more, b) for a, b in numbers]), size=size))
    return bounded(tuple(found))


def _idle(step: CutStep) -> CutStep:
    """A step of this kind that does not change rows."""
    return step._replace(numbers=_WHOLE[step.kind])


def _embedded(cut: Cut, other: Cut) -> tuple[Cut, Cut] | None:
    """Both cuts, the other with idle steps added so that it has the kinds and dimensions of this one. None if the
    other has steps that this one lacks, or another order."""
    left, found = list(other), []
    for step in cut:
        found.append(left.pop(0) if left and left[0][:2] == step[:2] else _idle(step))
    return None if left else (cut, tuple(found))


def bounded(cut: Cut) -> Cut:
    """The cut itself. Raises LimitExceeded if it has too many steps."""
    zigzags = sum(step.kind == ZIGZAG for step in cut)
    if len(cut) > MAX_STEPS or zigzags > MAX_ZIGZAGS:
        what = "slices of slices"
        raise LimitExceeded(
            f"{len(cut)} {what}, {zigzags} of them zig-zag; at most {MAX_STEPS}, and {MAX_ZIGZAGS}: get fewer rows",
            what=what,
            asked=len(cut),
            limit=MAX_STEPS,
        )
    return cut


def _both(rows: int, a: Number, more: int, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int) and a == b:
        return a
    return np.concatenate([np.broadcast_to(np.int64(a), rows), np.broadcast_to(np.int64(b), more)])


def equal(cut: Cut, other: Cut) -> bool:
    if cut is other:
        return True
    pairs = zip(cut, other, strict=False)
    return len(cut) == len(other) and all(
        a[:2] == b[:2] and all(np.array_equal(m, n) for m, n in zip(a.numbers, b.numbers, strict=True))
        for a, b in pairs
    )


def fraction(cut: Cut) -> float:
    """The approximate fraction of the rows' bytes that the cut leaves, exact if all rows have the same length in each
    dimension. If lengths differ, slices by a start and a stop count as whole rows."""
    left = 1.0
    for step in cut:
        if step.size:
            rows = max([len(number) for number in step.numbers if not isinstance(number, int)], default=1)
            begins, ends = spans((step,), np.full(rows, step.size, np.int64))
            left *= float((ends - begins).sum()) / (step.size * max(rows, 1))
        elif step.kind != SLICE:
            left *= float(np.mean(np.divide(1.0, step.numbers[1])))
    return left


def axes(cut: Cut) -> dict[int, Cut]:
    found: dict[int, Cut] = {}
    for step in cut:
        found[step.axis] = (*found.get(step.axis, ()), step)
    return found


def spans(steps: Cut, lengths: Index) -> tuple[Index, Index]:
    """The runs of items that the steps of one dimension leave of rows with these lengths, int64 [rows]. Returns the
    starts and the stops of the runs, each int64 [rows, runs]. Runs may be empty."""
    begins, ends = np.zeros((len(lengths), 1), np.int64), lengths.reshape(-1, 1)
    for step in steps:
        sizes = ends - begins
        before = np.cumsum(sizes, axis=1) - sizes
        runs = []
        for start, stop in _windows(step, sizes.sum(axis=1)):
            first = np.clip(start[:, None] - before, 0, sizes)
            last = np.clip(stop[:, None] - before, first, sizes)
            runs.append((begins + first, begins + last))
        begins, ends = (np.concatenate(each, axis=1) for each in zip(*runs, strict=True))
        begins, ends = _fewest(begins, ends)
    return begins, ends


def _windows(step: CutStep, total: Index) -> list[tuple[Index, Index]]:
    if step.kind == SLICE:
        start, stop = (np.where(np.less(n, 0), np.add(n, total), n) for n in step.numbers)
        return [(np.clip(start, 0, total), np.clip(stop, 0, total))]
    rank, ranks, multiple = (np.asarray(number, np.int64) for number in step.numbers)
    padded = -(-total // multiple) * multiple
    if step.kind == SHARE:
        part = padded // ranks
        return [(rank * part, (rank + 1) * part)]
    half = padded // (2 * ranks)
    other = 2 * ranks - 1 - rank
    return [(rank * half, (rank + 1) * half), (other * half, (other + 1) * half)]


def _fewest(begins: Index, ends: Index) -> tuple[Index, Index]:
    """The same runs in fewer columns: columns of empty runs are dropped, and columns whose runs touch in all rows are
    merged."""
    if begins.shape[1] > 1:
        kept = np.flatnonzero((ends > begins).any(axis=0))
        kept = kept if len(kept) else np.zeros(1, np.int64)
        begins, ends = begins[:, kept], ends[:, kept]
        breaks = np.flatnonzero((ends[:, :-1] != begins[:, 1:]).any(axis=0))
        begins, ends = begins[:, np.append(0, breaks + 1)], ends[:, np.append(breaks, ends.shape[1] - 1)]
    return begins, ends


def length(steps: Cut, size: int) -> int:
    """The length of a row of `size` items after the steps of one dimension, which have no arrays."""
    begins, ends = spans(steps, np.array([size], np.int64))
    return int((ends - begins).sum())


Encoded = tuple[int, int, list[int | bytes], int]


def encode(cut: Cut) -> list[Encoded]:
    """Plain values for a message. Arrays become bytes: little-endian integers of the least size that holds them all."""
    return [(step.kind, step.axis, list(map(_packed, step.numbers)), step.size) for step in cut]


def _packed(number: Number) -> int | bytes:
    if isinstance(number, int):
        return number
    most = max(int(number.max(initial=0)), -1 - int(number.min(initial=0)))
    code = _CODES[sum(most >= bound for bound in (1 << 7, 1 << 15, 1 << 31))]
    return code.encode() + number.astype(f"<{np.dtype(code).str[1:]}").tobytes()


def decode(encoded: Sequence[Sequence[Any]], rows: int) -> Cut:
    """The inverse of `encode`, for a cut of `rows` rows. Raises ValueError for other input."""
    if len(encoded) > MAX_STEPS or sum(step[0] == ZIGZAG for step in encoded) > MAX_ZIGZAGS:
        raise ValueError(f"more than {MAX_STEPS} slices in each other, or {MAX_ZIGZAGS} zig-zag ones")
    found = []
    for kind, axis, numbers, size in encoded:
        known = kind in _WHOLE and len(numbers) == len(_WHOLE[kind])
        if not known or not 0 <= axis < 1 << 8 or not 0 <= size <= END:
            raise ValueError("a slice of rows that is none")
        step = CutStep(kind, axis, tuple([_unpacked(number, rows) for number in numbers]), size)
        check(step)
        found.append(step)
    return tuple(found)


def _unpacked(packed: int | bytes, rows: int) -> Number:
    if isinstance(packed, int):
        return packed
    code = packed[:1].decode("latin-1")
    if not code or code not in _CODES:
        raise ValueError(f"numbers with the unknown code {code!r}")
    array = np.frombuffer(packed, f"<{np.dtype(code).str[1:]}", offset=1).astype(np.int64)
    if len(array) != rows:
        raise ValueError(f"{len(array)} numbers for {rows} rows")
    return array


def check(step: CutStep) -> None:
    """Raises ValueError for numbers that are invalid for the kind of step."""
    low = [int(np.min(number, initial=END)) for number in step.numbers]
    high = [int(np.max(number, initial=-END)) for number in step.numbers]
    if step.kind == SLICE:
        if min(low) < -END or max(high) > END:
            raise ValueError("a start or stop beyond any row")
        return
    rank, ranks, multiple = (np.asarray(number, np.int64) for number in step.numbers)
    least = 2 * ranks if step.kind == ZIGZAG else ranks
    if low[1] < 1 or high[1] > MOST_RANKS or low[0] < 0 or (rank >= ranks).any():
        raise ValueError("a rank that is not one of so many")
    if low[2] < 1 or high[2] > 1 << 40 or (multiple % least).any():
        raise ValueError("rows are padded to a multiple that gives each rank as much")
