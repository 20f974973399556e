"""Which tasks have taken which rows of a table, and the claims under which they did.

A task exists from its first take. A claim names what was given at once, so that later ranks, or a repeated call, are
given the same; the latest claims of a task are remembered.

Invariants: a row is taken by a task once, until it is given back; rows are taken all or none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from dataplane.errors import LimitExceeded
from dataplane.stream.packing import pack, unpack
from dataplane.table.lines import Lines
from dataplane.table.replica_state import TaskState

Index = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

MAX_TASKS = 256
"""Tasks that have taken rows of a table."""

MAX_CLAIMS = 4096
"""Claims of one task that are remembered."""


class Claims:
    """The claims of one task, and which of them name an existing row."""

    def __init__(self, there: Callable[[Index], Flags]) -> None:
        self._there = there
        self.given: OrderedDict[str, Index] = OrderedDict()
        self._left: dict[str, int] = {}  # rows that are there
        self._naming: dict[int, list[str]] = {}
        self._empty: set[str] = set()  # that named no row which was there

    def add(self, claim: str, given: Index) -> None:
        """Remember a claim; if there are too many, the oldest is forgotten."""
        rows = np.unique(given)
        rows = rows[self._there(rows)]
        self.given[claim] = given
        self._left[claim] = len(rows)
        for number in rows.tolist():
            self._naming.setdefault(number, []).append(claim)
        if not len(rows):
            self._empty.add(claim)
        while len(self.given) > MAX_CLAIMS:
            self._forget(next(iter(self.given)))

    def _forget(self, claim: str) -> None:
        for number in np.unique(self.given.pop(claim)).tolist():
            naming = self._naming.get(number, [])
            if claim in naming:
                naming.remove(claim)
                if not naming:
                    del self._naming[number]
        del self._left[claim]
        self._empty.discard(claim)

    def give_back(self, numbers: Index) -> None:
        """Forget the claims that name one of these rows."""
        for claim in {claim for number in numbers.tolist() for claim in self._naming.get(number, ())}:
            self._forget(claim)

    def gone(self, numbers: Index) -> None:
        """These rows are gone: forget the claims that name no other."""
        over = set(self._empty)
        for number in numbers.tolist() if self._naming else ():
            for claim in self._naming.pop(number, ()):
                self._left[claim] -= 1
                if not self._left[claim]:
                    over.add(claim)
        for claim in over:
            self._forget(claim)


class Taking:
    """The tasks of a table with these lines. `there(numbers)`: which rows exist."""

    def __init__(self, lines: Lines, there: Callable[[Index], Flags]) -> None:
        self._lines = lines
        self._there = there
        self._claims: dict[str, Claims] = {}

    @property
    def tasks(self) -> list[str]:
        """The tasks that have taken rows, or may have."""
        return list(self._claims)

    def given(self, task: str, claim: str) -> Index | None:
        """What was given under this claim; None if nobody has made it."""
        return self._claims[task].given.get(claim) if task in self._claims else None

    def taken(self, task: str | None, at: Index) -> Flags:
        """Which of these lines the task has taken."""
        if task is None or task not in self._claims:
            return np.zeros(len(at), np.bool_)
        flags: Flags = self._lines["taken", task][at]
        return flags

    def take(self, task: str, at: Index, give: Index, claim: str) -> bool:
        """Mark these lines, and remember what is given under the claim, unless that is empty. False, and nothing has
        changed, if one of them was taken. Raises LimitExceeded for too many tasks."""
        if self.taken(task, at).any():
            return False
        if task not in self._claims:
            self._begin(task)
        self._lines["taken", task][at] = True
        if claim:
            self._claims[task].add(claim, give)
        return True

    def _begin(self, task: str) -> None:
        if len(self._claims) >= MAX_TASKS:
            what = "tasks of a table"
            raise LimitExceeded(
                f"{task!r} is one of more than {MAX_TASKS} {what}", what=what, asked=MAX_TASKS + 1, limit=MAX_TASKS
            )
        self._claims[task] = Claims(self._there)
        self._lines.make(("taken", task), np.bool_, False)

    def forget(self, task: str | None) -> None:
        """Forget the task, or every task."""
        for name in self.tasks if task is None else [task] if task in self._claims else []:
            del self._claims[name]
            self._lines.drop(("taken", name))

    def give_back(self, task: str | None, at: Index, numbers: Index) -> None:
        """Undo that the task, or any task, has taken these lines, which are the rows with these numbers."""
        for name in self.tasks if task is None else [task] if task in self._claims else []:
            self._lines["taken", name][at] = False
            self._claims[name].give_back(numbers)

    def gone(self, numbers: Index) -> None:
        """Rows with these numbers are gone; claims on no other row are forgotten."""
        for claims in self._claims.values():
            claims.gone(numbers)

    def state(self, at: Index) -> list[TaskState]:
        """For each task which of these lines it has taken, by position, and its claims."""
        return [
            TaskState(
                task,
                pack(np.flatnonzero(self._lines["taken", task][at])),
                [(claim, pack(given)) for claim, given in claims.given.items()],
            )
            for task, claims in self._claims.items()
        ]

    def restore(self, tasks: list[TaskState], lines: int) -> None:
        """Restore these tasks, for so many lines. Raises ValueError, LimitExceeded."""
        for each in tasks:
            taken = unpack(each.taken)
            if len(taken) and not 0 <= taken.min() <= taken.max() < lines:
                raise ValueError("a task that has taken what is not there")
            self._begin(each.name)
            self._lines["taken", each.name][taken] = True
            for claim, given in each.claims:
                self._claims[each.name].add(claim, unpack(given))
