"""Splits rows over shards so that the largest sum of lengths is close to the mean.

A step of training lasts as long as its most loaded rank. Each row goes to exactly one shard, a shard's rows ascend,
and the same lengths always give the same shards. The largest sum is never above that of dealing the rows out in turn.

There are two steps. First, largest differencing (Karmarkar & Karp 1982) over tuples of one sum a shard: the two least
balanced partial solutions are joined, the largest shard of one with the smallest of the other, until one is left. For
equal counts the first solutions are not rows but runs of `shards` rows of about the same length, one a shard, so that
every join keeps the counts (Michiels, Korst, Aarts & van Leeuwen 2003). Second, rows of the largest shard are exchanged
with rows of others while that makes the largest smaller, each time by the exchange after which the larger of the two
sums is smallest.

A join is one sort of a few numbers; the rows of each shard are computed once, at the end, from the tree of joins.
Measured, the largest sum over the mean, 512 rows in 64 equal shards, medians over draws from two recorded tasks:
differencing alone 1.0009 and 1.56, with the exchanges 1.0002 and 1.10. The second task has long tails: its longest row
and the shortest rows beside it make 1.09 already. Rejected: longest first to the least loaded shard that has a place
(1.010 and 1.14), and trying exchanges shard by shard from the smallest on (no better, and slower).
"""

from __future__ import annotations

import heapq
import math
from typing import TypeAlias

import numpy as np

from dataplane.batch.rows import Index
from dataplane.errors import Misuse

_ROUNDS = 512  # exchanges: each takes about 40 microseconds, and most splits need fewer than 50

_PAIRS = 1 << 14  # pairs of rows that are compared for one exchange

_MOST = 1 << 62  # sums of two shards stay below 2**63

_NONE = -1  # in place of a row, if a shard has none


def balanced(lengths: Index, shards: int, *, equal: bool = True) -> list[Index]:
    """The rows of each of `shards` shards, given each row's length (int64[n], none negative).

    With `equal` each shard gets n // shards rows or one more; without, any number, also none. Raises Misuse for invalid
    lengths, and for fewer than one shard.
    """
    lengths = _checked(lengths, shards)
    if not len(lengths):
        return [np.empty(0, np.int64) for _ in range(shards)]
    start = _runs(lengths, shards) if equal else _singles(lengths)
    split = _differenced(lengths, start, shards)
    in_turn = [np.arange(shard, len(lengths), shards, dtype=np.int64) for shard in range(shards)]
    if _largest(lengths, in_turn) < _largest(lengths, split):
        split = in_turn
    return _improved(lengths, split, equal=equal)


def _checked(lengths: Index, shards: int) -> Index:
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise Misuse(f"lengths are a flat array of integers, not {array.dtype} of shape {array.shape}")
    if array.size and array.min() < 0:
        raise Misuse(f"row {int(array.argmin())} has the length {int(array.min())}")
    if shards < 1:
        raise Misuse(f"rows are split over 1 shard or more, not {shards}")
    if array.sum(dtype=np.float64) >= _MOST:
        raise Misuse("the lengths sum to 2**62 or more")
    return array.astype(np.int64, copy=False)


def _largest(lengths: Index, split: list[Index]) -> int:
    return max(int(lengths[rows].sum()) for rows in split)


def _runs(lengths: Index, shards: int) -> Index:
    """The rows, longest first, `shards` to a line; the last line's places without a row come last."""
    order = np.argsort(-lengths, kind="stable")
    runs = np.full(-(-len(order) // shards) * shards, _NONE, np.int64)
    runs[: len(order)] = order
    return runs.reshape(-1, shards)


def _singles(lengths: Index) -> Index:
    """The rows, longest first, one to a line."""
    return np.argsort(-lengths, kind="stable").reshape(-1, 1)


_Join: TypeAlias = tuple[int, int, Index, Index]  # two partial solutions; for each, the shard that each shard receives


def _differenced(lengths: Index, start: Index, shards: int) -> list[Index]:
    """The rows of each shard by largest differencing. A line of `start` is a partial solution, longest first."""
    sums: dict[int, Index] = {}  # by partial solution, the sums of its shards, the largest first
    heap: list[tuple[int, int]] = []  # minus a solution's largest sum less its smallest; the solution's number
    for number, rows in enumerate(start):
        line = np.zeros(shards, np.int64)
        line[: len(rows)] = np.where(rows == _NONE, 0, lengths[rows])
        sums[number] = line
        heap.append((int(line[-1] - line[0]), number))
    heapq.heapify(heap)
    joins: list[_Join] = []
    while len(heap) > 1:
        (_, left), (_, right) = heapq.heappop(heap), heapq.heappop(heap)
        joined = sums.pop(left) + sums.pop(right)[::-1]
        order = np.argsort(-joined, kind="stable")
        number = len(start) + len(joins)
        joins.append((left, right, order, shards - 1 - order))
        sums[number] = line = joined[order]
        heapq.heappush(heap, (int(line[-1] - line[0]), number))
    return _unfolded(start, joins, shards)


def _unfolded(start: Index, joins: list[_Join], shards: int) -> list[Index]:
    """The rows of each shard of the last solution, from the top of the tree of joins down to its leaves."""
    of_row: list[tuple[Index, Index]] = []  # rows, and the shard of each
    pending = [(len(start) + len(joins) - 1, np.arange(shards, dtype=np.int64))]
    while pending:
        number, places = pending.pop()  # places: for each shard of the result, its place in this solution
        if number >= len(start):
            left, right, of_left, of_right = joins[number - len(start)]
            pending += [(left, of_left[places]), (right, of_right[places])]
            continue
        line = start[number]
        shard_at = np.empty(shards, np.int64)
        shard_at[places] = np.arange(shards)
        held = line != _NONE
        of_row.append((line[held], shard_at[: len(line)][held]))
    return _by_shard(np.concatenate([rows for rows, _ in of_row]), np.concatenate([at for _, at in of_row]), shards)


def _improved(lengths: Index, split: list[Index], *, equal: bool) -> list[Index]:
    """The split after exchanges and moves of rows of the largest shard, while these make it smaller."""
    shards = len(split)
    sums, counts = np.array([[lengths[rows].sum(), len(rows)] for rows in split], np.int64).T
    shard_of = np.empty(len(lengths), np.int64)
    for shard, rows in enumerate(split):
        shard_of[rows] = shard
    for _ in range(_ROUNDS):
        heavy = int(sums.argmax())
        ours, theirs = np.flatnonzero(shard_of == heavy), np.flatnonzero(shard_of != heavy)
        if len(ours) * len(theirs) > _PAIRS:
            ours, theirs = _some(ours, theirs, shard_of, sums)
        # A move is an exchange for a row of length 0. With equal counts a row moves only to a shard of fewer rows.
        to = np.flatnonzero((counts < counts[heavy]) if equal else (np.arange(shards) != heavy))
        other = np.concatenate([shard_of[theirs], to])
        less = lengths[ours][:, np.newaxis] - np.concatenate([lengths[theirs], np.zeros(len(to), np.int64)])
        larger = np.maximum(sums[heavy] - less, sums[other] + less)
        if not larger.size or larger.min() >= sums[heavy]:
            break
        given, taken = divmod(int(larger.argmin()), len(other))
        light = int(other[taken])
        shard_of[ours[given]] = light
        if taken < len(theirs):
            shard_of[theirs[taken]] = heavy
        else:
            counts[heavy] -= 1
            counts[light] += 1
        sums[heavy] -= less[given, taken]
        sums[light] += less[given, taken]
    return _by_shard(np.arange(len(lengths), dtype=np.int64), shard_of, shards)


def _some(ours: Index, theirs: Index, shard_of: Index, sums: Index) -> tuple[Index, Index]:
    """At most about `_PAIRS` pairs: some of our rows, at regular distances, and rows of the smallest other shards."""
    side = math.isqrt(_PAIRS)
    ours = ours[:: -(-len(ours) // side)]
    rank = np.argsort(np.argsort(sums, kind="stable"))
    ranks = rank[shard_of[theirs]]
    # The smallest shards that together have so many rows, but at least the smallest.
    last = max(int(np.searchsorted(np.cumsum(np.bincount(ranks)), _PAIRS // len(ours), side="right")) - 1, 0)
    theirs = theirs[ranks <= last]
    return ours, theirs[:: max(-(-len(theirs) * len(ours) // _PAIRS), 1)]


def _by_shard(rows: Index, shard_of: Index, shards: int) -> list[Index]:
    """The rows of each shard, in their given order. `shard_of`: the shard of each row."""
    order = np.argsort(shard_of, kind="stable")
    return np.split(rows[order], np.cumsum(np.bincount(shard_of, minlength=shards))[:-1])
