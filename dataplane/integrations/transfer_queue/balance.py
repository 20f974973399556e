"""Items dealt to parts of equally many, so that the sums of their weights are about equal.

The largest differencing method of Karmarkar and Karp (1982), for parts of equal count: items are sorted and cut into
rows of one a part; then, as long as there are two rows, the two whose parts differ most are joined, the heaviest part
of one with the lightest of the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count

_Part = tuple[int, list[int]]  # its weight, and its items


def balanced(weights: Sequence[int], parts: int) -> list[list[int]]:
    """The items of each part, ascending. Raises ValueError where they do not come out even."""
    if parts < 1 or len(weights) % parts:
        raise ValueError(f"{len(weights)} groups are not dealt evenly to {parts} ranks")
    order = sorted(range(len(weights)), key=lambda item: (weights[item], item))
    turn = count()  # rows that differ equally are joined in the order in which they were made
    rows: list[tuple[int, int, list[_Part]]] = []
    for start in range(0, len(order), parts):
        row = sorted(((weights[item], [item]) for item in order[start : start + parts]), reverse=True)
        heapq.heappush(rows, (row[-1][0] - row[0][0], next(turn), row))
    while len(rows) > 1:
        (_, _, one), (_, _, other) = heapq.heappop(rows), heapq.heappop(rows)
        row = sorted(((a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)), reverse=True)
        heapq.heappush(rows, (row[-1][0] - row[0][0], next(turn), row))
    return [sorted(items) for _, items in rows[0][2]] if rows else [[] for _ in range(parts)]
