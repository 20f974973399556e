"""The rows of a table that each task has claimed, and the ids of the claims.

A task exists from its first claim. A claim id identifies the rows of one claim, so that other ranks, or a repeated
call, get the same rows. At most the last `MAX_CLAIMS` ids of a task are remembered; an id is
forgotten once one of its rows is released, or all are gone.

Invariants: a task that has claimed a row cannot claim it again before the row is released; a claim gets all of its
rows or none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from dataplane.errors import LimitExceeded
from dataplane.stream.packing import pack, unpack
from dataplane.stream.page import Flags, Index
from dataplane.table.replica_state import TaskState
from dataplane.table.table_cells import ColumnArrays

MAX_TASKS = 256
"""The most tasks that have claimed rows of a table."""

MAX_CLAIMS = 4096
"""The most claim ids of one task that are remembered."""


class ClaimIds:
    """The claim ids of one task, and the rows that they name."""

    def __init__(self, there: Callable[[Index], Flags]) -> None:
        self._there = there
        self.given: OrderedDict[str, Index] = OrderedDict()
        self._left: dict[str, int] = {}  # by claim: the number of its rows that exist
        self._naming: dict[int, list[str]] = {}
        self._empty: set[str] = set()  # claims that named no existing row

    def add(self, claim: str, given: Index) -> None:
        """Remember a claim. If there are too many, forget the oldest."""
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

    def release(self, numbers: Index) -> None:
        """Forget the claims that name one of these rows."""
        for claim in {claim for number in numbers.tolist() for claim in self._naming.get(number, ())}:
            self._forget(claim)

    def gone(self, numbers: Index) -> None:
        """Forget the claims that have no rows left. `numbers`: the rows that were just removed."""
        over = set(self._empty)
        for number in numbers.tolist() if self._naming else ():
            for claim in self._naming.pop(number, ()):
                self._left[claim] -= 1
                if not self._left[claim]:
                    over.add(claim)
        for claim in over:
            self._forget(claim)


class Claims:
    """The tasks of a table whose rows are in `lines`. `there(numbers)` flags the rows that exist."""

    def __init__(self, lines: ColumnArrays, there: Callable[[Index], Flags]) -> None:
        self._lines = lines
        self._there = there
        self._ids: dict[str, ClaimIds] = {}

    @property
    def tasks(self) -> list[str]:
        """The tasks that have ever claimed rows, except forgotten ones."""
        return list(self._ids)

    def find(self, task: str, claim_id: str) -> Index | None:
        """The rows of the claim with this id; None if there is none."""
        return self._ids[task].given.get(claim_id) if task in self._ids else None

    def claimed(self, task: str | None, at: Index) -> Flags:
        """Flags of the lines that the task has claimed."""
        if task is None or task not in self._ids:
            return np.zeros(len(at), np.bool_)
        flags: Flags = self._lines["claimed", task][at]
        return flags

    def claim(self, task: str, at: Index, give: Index, claim_id: str) -> bool:
        """Mark these lines as claimed, and remember the rows `give` under the id, unless the id is empty. If one of the
        lines was claimed before, change nothing and return False. Raises LimitExceeded for too many tasks."""
        if self.claimed(task, at).any():
            return False
        if task not in self._ids:
            self._begin(task)
        self._lines["claimed", task][at] = True
        if claim_id:
            self._ids[task].add(claim_id, give)
        return True

    def _begin(self, task: str) -> None:
        if len(self._ids) >= MAX_TASKS:
            self._forget_idle()
        if len(self._ids) >= MAX_TASKS:
            what = "tasks of a table"
            raise LimitExceeded(
                f"{task!r} is one of more than {MAX_TASKS} {what}", what=what, asked=MAX_TASKS + 1, limit=MAX_TASKS
            )
        self._ids[task] = ClaimIds(self._there)
        self._lines.make(("claimed", task), np.bool_, False)

    def _forget_idle(self) -> None:
        """Forget the tasks whose claims are all of rows that are gone."""
        there = self._there(self._lines["number"])
        for task in self.tasks:
            if not self._ids[task].given and not (self._lines["claimed", task] & there).any():
                self.forget(task)

    def forget(self, task: str | None) -> None:
        for name in self.tasks if task is None else [task] if task in self._ids else []:
            del self._ids[name]
            self._lines.drop(("claimed", name))

    def release(self, task: str | None, at: Index, numbers: Index) -> None:
        """Undo the claims of the task, or of all tasks if that is None, on the rows with these numbers, whose lines are
        `at`."""
        for name in self.tasks if task is None else [task] if task in self._ids else []:
            self._lines["claimed", name][at] = False
            self._ids[name].release(numbers)

    def gone(self, numbers: Index) -> None:
        """Forget the claims of all tasks that have no rows left. `numbers`: the rows that were just removed."""
        for claims in self._ids.values():
            claims.gone(numbers)

    def state(self, at: Index) -> list[TaskState]:
        """For each task the positions of the lines that it has claimed, and its claim ids."""
        return [
            TaskState(
                task,
                pack(np.flatnonzero(self._lines["claimed", task][at])),
                [(claim, pack(given)) for claim, given in claims.given.items()],
            )
            for task, claims in self._ids.items()
        ]

    def restore(self, tasks: list[TaskState], lines: int) -> None:
        """Restore these tasks. `lines`: the number of lines. Raises ValueError, LimitExceeded."""
        for each in tasks:
            claimed = unpack(each.claimed)
            if len(claimed) and not 0 <= claimed.min() <= claimed.max() < lines:
                raise ValueError("a task that has claimed what is not there")
            self._begin(each.name)
            self._lines["claimed", each.name][claimed] = True
            for claim, given in each.claim_ids:
                self._ids[each.name].add(claim, unpack(given))
