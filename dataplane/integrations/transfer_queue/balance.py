"""Items dealt to parts, so that the sums of their weights are about equal.

The largest differencing method of Karmarkar and Karp (1982). Rows of a part each are joined, as long as there are two,
the two whose parts differ most: the heaviest part of one with the lightest of the other. For parts of equally many,
items are sorted and cut into rows of one a part; else each item is a row, with parts that are empty.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count

_Part = tuple[int, list[int]]  # its weight, and its items


def balanced(weights: Sequence[int], parts: int) -> list[list[int]]:
    """The items of each part, ascending; equally many. Raises ValueError where they do not come out even."""
    if parts < 1 or len(weights) % parts:
        raise ValueError(f"{len(weights)} groups are not dealt evenly to {parts} ranks")
    order = sorted(range(len(weights)), key=lambda item: (weights[item], item))
    cut = (order[start : start + parts] for start in range(0, len(order), parts))
    return _joined([sorted(((weights[item], [item]) for item in row), reverse=True) for row in cut], parts)


def get_seqlen_balanced_partitions(seqlen_list: list[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """The positions of lengths in each of so many partitions, ascending; `equal_size`: equally many in each.

    Raises AssertionError, as TransferQueue's, where there are too few, or they do not come out even.
    """
    return [sorted(part) for part in karmarkar_karp(seqlen_list, k_partitions, equal_size)]


def karmarkar_karp(seqlen_list: list[int], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """As `get_seqlen_balanced_partitions`."""
    if not 0 < k_partitions <= len(seqlen_list):
        raise AssertionError(f"{len(seqlen_list)} lengths do not make {k_partitions} partitions that are not empty")
    if equal_size:
        if len(seqlen_list) % k_partitions:
            raise AssertionError(f"{len(seqlen_list)} lengths are not {k_partitions} partitions of equally many")
        return balanced(seqlen_list, k_partitions)
    order = sorted(range(len(seqlen_list)), key=lambda item: (seqlen_list[item], item))
    empty: list[_Part] = [(0, [])] * (k_partitions - 1)
    parts = _joined([[(seqlen_list[item], [item]), *empty] for item in order], k_partitions)
    while not all(parts):  # lengths of 0 weigh nothing, and may all be in one
        parts.sort(key=len)
        parts[0].append(parts[-1].pop())
    return parts


def _joined(several: Sequence[list[_Part]], parts: int) -> list[list[int]]:
    """The parts of rows, each of which has its heaviest part first, once all are joined."""
    turn = count()  # rows that differ equally are joined in the order in which they were made
    rows = [(row[-1][0] - row[0][0], next(turn), row) for row in several]
    heapq.heapify(rows)
    while len(rows) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(rows), heapq.heappop(rows)
        row = sorted(((a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)), reverse=True)
        heapq.heappush(rows, (row[-1][0] - row[0][0], next(turn), row))
    return [sorted(items) for _, items in rows[0][2]] if rows else [[] for _ in range(parts)]
