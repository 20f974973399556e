"""The groups of a stream: rows of one prompt. How many rows each has, and how many were dropped.

A group is a text or an integer to users and a number here, which is given to another group when the last row of this
one is gone. A row without a group has one of its own, with the number -1 - row, of which nothing is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64]


class Groups:
    """Counts by group."""

    def __init__(self, tasks: int) -> None:
        self._numbers: dict[Any, int] = {}
        self._names: dict[int, Any] = {}
        self._free: list[int] = []
        self._members = np.zeros(64, np.int64)  # appended, and not dropped
        self._dropped = np.zeros(64, np.int64)
        self._left = np.zeros(64, np.int64)  # appended, and not gone
        self._dead = np.zeros((tasks, 64), np.int64)  # by task: dead for it, and not dropped

    @property
    def open(self) -> int:
        """How many groups have rows in the stream."""
        return len(self._numbers)

    def enter(self, groups: Sequence[Any] | None, rows: Index) -> Index:
        """The numbers of the groups of new rows."""
        if groups is None:
            return -1 - rows
        found = {name: self._number(name) for name in dict.fromkeys(groups)}
        numbers = np.fromiter(map(found.__getitem__, groups), np.int64, len(groups))
        np.add.at(self._members, numbers, 1)
        np.add.at(self._left, numbers, 1)
        return numbers

    def _number(self, name: Any) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._free.pop() if self._free else len(self._numbers)
            self._numbers[name] = number
            self._names[number] = name
            if number >= len(self._members):
                more = np.zeros(len(self._members), np.int64)
                self._members, self._dropped, self._left = (
                    np.concatenate((counts, more)) for counts in (self._members, self._dropped, self._left)
                )
                self._dead = np.concatenate((self._dead, np.zeros_like(self._dead)), axis=1)
        return number

    def sizes(self, numbers: Index, task: int | None = None) -> tuple[Index, Index]:
        """Of each of these groups: how many rows were appended and not dropped, and how many were dropped. To a task,
        rows that are dead for it are dropped."""
        own = numbers < 0
        shared = np.where(own, 0, numbers)
        dead = 0 if task is None else self._dead[task, shared]
        return np.where(own, 1, self._members[shared] - dead), np.where(own, 0, self._dropped[shared] + dead)

    def drop(self, numbers: Index) -> None:
        """A row of each of these groups does not count any more."""
        numbers = numbers[numbers >= 0]
        np.add.at(self._members, numbers, -1)
        np.add.at(self._dropped, numbers, 1)

    def dead(self, task: int, numbers: Index, more: int = 1) -> None:
        """A row of each of these groups is dead for the task; `more=-1`: it was, and is dropped now."""
        np.add.at(self._dead[task], numbers[numbers >= 0], more)

    def gone(self, numbers: Index) -> None:
        """A row of each of these groups is gone."""
        numbers = numbers[numbers >= 0]
        np.add.at(self._left, numbers, -1)
        for number in np.unique(numbers[self._left[numbers] == 0]).tolist():
            del self._numbers[self._names.pop(number)]
            self._free.append(number)
            self._members[number] = self._dropped[number] = self._dead[:, number] = 0

    def names(self, numbers: Index) -> list[Any]:
        """What users call these groups; None for a row's own."""
        return list(map(self._names.get, numbers.tolist()))
