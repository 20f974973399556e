"""References to partly the same stored rows: groups of them, and reads of each such row once for a whole group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np

from dataplane.batch import locations
from dataplane.batch.batch import Batch, Column, taken
from dataplane.batch.concat import concat
from dataplane.batch.field import Field
from dataplane.batch.layout import Index
from dataplane.batch.ref import BatchRef, ShardKey


def overlapping(refs: Sequence[BatchRef]) -> list[list[int]]:
    """The references by position, grouped: two with a common stored row of a column are in one group, transitively.
    Groups and their members are in the given order."""
    leaders = list(range(len(refs)))  # of each, one of its group; a group's first is its own

    def leader(number: int) -> int:
        while leaders[number] != number:
            number = leaders[number]
        return number

    for rows in _meant(refs).values():
        owners = np.full(max(int(chosen.max()) for _, chosen in rows) + 1, -1, np.int64)
        for number, chosen in rows:
            for other in np.unique(owners[chosen]).tolist():
                if other >= 0:
                    first, second = sorted((leader(other), leader(number)))
                    leaders[second] = first
            owners[chosen] = number
    groups: dict[int, list[int]] = {}
    for number in range(len(refs)):
        groups.setdefault(leader(number), []).append(number)
    return list(groups.values())


def _meant(refs: Sequence[BatchRef]) -> dict[tuple[ShardKey, int], list[tuple[int, Index]]]:
    """For each stored column that several references use: the rows that each of them uses."""
    found: dict[tuple[ShardKey, int], list[tuple[int, Index]]] = {}
    for number, ref in enumerate(refs):
        for key, selected in locations.footprint(locations.unlinked(ref)).items():
            for ordinals, rows in selected:
                for ordinal in ordinals:
                    found.setdefault((key, ordinal), []).append((number, rows.array()))
    return {cell: rows for cell, rows in found.items() if len(rows) > 1}


def read_once(get: Callable[[BatchRef], Batch], refs: Sequence[BatchRef]) -> list[Batch]:
    """The rows of each reference. Columns of one name in several references are read together, each stored row once.
    Raises as `get`."""
    if len(refs) == 1:
        return [get(refs[0])]
    who: dict[tuple[str, Field], list[int]] = {}
    for number, ref in enumerate(refs):
        for name, field in ref.schema.items():
            who.setdefault((name, field), []).append(number)
    together: dict[tuple[int, ...], list[str]] = {}
    for (name, _), numbers in who.items():
        together.setdefault(tuple(numbers), []).append(name)
    columns: list[dict[str, Column]] = [{} for _ in refs]
    for who_asks, names in together.items():
        edges = [0, *accumulate(len(refs[number]) for number in who_asks)]
        for once, index in concat([refs[number].select(*names) for number in who_asks]).distinct():
            batch = get(once)
            for number, (start, stop) in zip(who_asks, pairwise(edges), strict=True):
                for name, column in batch.items():
                    columns[number][name] = _rows(column, start, stop, index)
    return [Batch({name: found[name] for name in ref.schema}) for ref, found in zip(refs, columns, strict=True)]


def _rows(column: Column, start: int, stop: int, index: Index | None) -> Column:
    """The rows at the positions `index[start:stop]`, or from `start`: as a run if they are consecutive."""
    if index is None or start == stop:
        return column[start:stop]
    chosen = index[start:stop]
    if (np.diff(chosen) == 1).all():
        return column[int(chosen[0]) : int(chosen[-1]) + 1]
    return taken(column, chosen)
