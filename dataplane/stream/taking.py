"""Which tasks have taken which rows of a table, and what was given under which claim.

A task is there from the moment that it first takes. A claim names what was taken at once, so that those who come later,
or make the same call again, are given the same; the last ones of a task are remembered.

What always holds: a row is taken by a task once, until it is given back; rows are taken all or none.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from dataplane.errors import LimitExceeded
from dataplane.stream.lines import Lines

Index = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

MAX_TASKS = 256
"""Tasks that have taken rows of a table."""

MAX_CLAIMS = 4096
"""Claims of one task that are remembered."""


class Taking:
    """The tasks of a table whose rows are these lines."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._claims: dict[str, OrderedDict[str, Index]] = {}

    @property
    def tasks(self) -> list[str]:
        """Those that have taken rows, or may have."""
        return list(self._claims)

    def given(self, task: str, claim: str) -> Index | None:
        """What was given under this claim; None where nobody has made it."""
        return self._claims[task].get(claim) if task in self._claims else None

    def taken(self, task: str | None, at: Index) -> Flags:
        """Which of these lines the task has taken."""
        if task is None or task not in self._claims:
            return np.zeros(len(at), np.bool_)
        flags: Flags = self._lines["taken", task][at]
        return flags

    def take(self, task: str, at: Index, give: Index, claim: str) -> bool:
        """Mark these lines, and remember what is given under the claim, if it has a name. False, and nothing has
        changed, where one of them was taken. Raises LimitExceeded for too many tasks."""
        if self.taken(task, at).any():
            return False
        if task not in self._claims:
            self._begin(task)
        self._lines["taken", task][at] = True
        if claim:
            claims = self._claims[task]
            claims[claim] = give
            while len(claims) > MAX_CLAIMS:
                claims.popitem(last=False)
        return True

    def _begin(self, task: str) -> None:
        if len(self._claims) >= MAX_TASKS:
            what = "tasks of a table"
            raise LimitExceeded(
                f"{task!r} is one of more than {MAX_TASKS} {what}", what=what, asked=MAX_TASKS + 1, limit=MAX_TASKS
            )
        self._claims[task] = OrderedDict()
        self._lines.make(("taken", task), np.bool_, False)

    def forget(self, task: str | None) -> None:
        """The task, or every task, has never been."""
        for name in self.tasks if task is None else [task] if task in self._claims else []:
            del self._claims[name]
            self._lines.drop(("taken", name))

    def give_back(self, task: str | None, at: Index, numbers: Index) -> None:
        """These lines, which are rows of these numbers, are as if the task, or any task, had never taken them."""
        for name in self.tasks if task is None else [task] if task in self._claims else []:
            self._lines["taken", name][at] = False
            self._forget_claims(name, lambda given: bool(np.isin(given, numbers).any()))

    def gone(self, there: Callable[[Index], Flags]) -> None:
        """Claims of which all rows have gone are nobody's."""
        for name in self._claims:
            self._forget_claims(name, lambda given: not there(given).any())

    def _forget_claims(self, task: str, over: Callable[[Index], bool]) -> None:
        claims = self._claims[task]
        for claim in [claim for claim, given in claims.items() if over(given)]:
            del claims[claim]
