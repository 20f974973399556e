"""The groups of a stream: the rows of one prompt. Counts the rows of each group, and those that were dropped.

Users name a group by a text or an integer. Here it is a number, which is reused once the last row of the group is gone.
A row without a group is in one of its own, with the number -1 - row; nothing is stored for it.

A task counts only the rows of a group that it has not done yet, not those that it acked or that expired for it. Once no
row of the group is left for the task, dropped rows do not count either. So a name that is used again is a new group for
a task that is done with the old one. Dead letters of a task count as dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dataplane.errors import Misuse
from dataplane.stream.page import Flags, Index

_LEAST = 8  # groups for which the arrays have room at first


class GroupCounts:
    """The counts of rows by group."""

    def __init__(self, tasks: int) -> None:
        self._numbers: dict[Any, int] = {}
        self._names: dict[int, Any] = {}
        self._free: list[int] = []
        self._members = np.zeros(_LEAST, np.int64)  # rows in the stream that are not dropped
        self._dropped = np.zeros(_LEAST, np.int64)
        self._left = np.zeros(_LEAST, np.int64)  # rows in the stream
        self._done = np.zeros((tasks, _LEAST), np.int64)  # by task: members that it acked or that expired for it
        self._dead = np.zeros((tasks, _LEAST), np.int64)  # by task: members that are dead letters of it
        self._past = np.zeros((tasks, _LEAST), np.int64)  # by task: dropped rows that do not count for it

    @property
    def open(self) -> int:
        return len(self._numbers)

    def enter(self, groups: Sequence[Any] | None, rows: Index) -> Index:
        """The numbers of the groups of new rows. A row with None is in a group of its own."""
        own: Index = -1 - rows
        if groups is None:
            return own
        found = {name: -1 if name is None else self._number(name) for name in dict.fromkeys(groups)}
        numbers = np.fromiter(map(found.__getitem__, groups), np.int64, len(groups))
        named = numbers[numbers >= 0]
        np.add.at(self._members, named, 1)
        np.add.at(self._left, named, 1)
        return np.where(numbers < 0, own, numbers)

    def enter_one(self, name: Any) -> int:
        """As `enter`, for a single row that has a group."""
        number = self._number(name)
        self._members[number] += 1
        self._left[number] += 1
        return number

    def check(self, groups: Sequence[Any], size: int) -> None:
        """Raise Misuse if new rows would make a group larger than `size`, its dropped rows included. `groups`: of each
        new row."""
        for name, more in Counter(group for group in groups if group is not None).items():
            number = self._numbers.get(name)
            # Not `_dropped` alone: a replica that was restored from a snapshot does not know it.
            gone = 0 if number is None else int((self._dropped[number] - self._past[:, number]).max())
            there = 0 if number is None else int(self._members[number]) + gone
            if there + more > size:
                dropped = f", {gone} dropped" if gone else ""
                raise Misuse(
                    f"group {name!r} has {there} rows{dropped}, and {more} more would make it larger than the stream's"
                    f" group_size of {size}: append at most {size} rows a group, and give each prompt its own group"
                    f"{'; dropped rows are not replaced: extend a row in place of dropping it' if dropped else ''}"
                )

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
                self._done, self._dead, self._past = (
                    np.concatenate((counts, np.zeros_like(counts)), axis=1)
                    for counts in (self._done, self._dead, self._past)
                )
        return number

    def sizes(self, numbers: Index, task: int) -> tuple[Index, Index]:
        """For each of these groups, the numbers of rows and of dropped rows that count for the task."""
        own = numbers < 0
        shared = np.where(own, 0, numbers)
        dead = self._dead[task, shared]
        members = self._members[shared] - self._done[task, shared] - dead
        dropped = self._dropped[shared] - self._past[task, shared] + dead
        return np.where(own, 1, members), np.where(own, 0, dropped)

    def done(self, task: int, numbers: Index) -> None:
        """Count a row of each group as acked by the task, or expired for it. The rows are not dropped."""
        if not self._names:
            return
        numbers = numbers[numbers >= 0]
        np.add.at(self._done[task], numbers, 1)
        self._pass(task, numbers)

    def _pass(self, task: int, numbers: Index) -> None:
        """For each group without a row left for the task, exclude the rows dropped so far from the task's count. A dead
        letter counts as left, because it may be retried."""
        over = numbers[self._members[numbers] == self._done[task, numbers]]
        self._past[task, over] = self._dropped[over]

    def dead(self, task: int, numbers: Index, more: int = 1) -> None:
        """Count a row of each group as a dead letter of the task. `more` -1: no longer. The rows are not dropped."""
        np.add.at(self._dead[task], numbers[numbers >= 0], more)

    def drop(self, numbers: Index, done: Flags, dead: Flags) -> None:
        """Count a row of each group as dropped. `done`, `dead`: flags [tasks, rows], whether the task was done with the
        row, and whether the row is a dead letter of the task."""
        named = numbers >= 0
        np.add.at(self._members, numbers[named], -1)
        np.add.at(self._dropped, numbers[named], 1)
        for counts, flags in ((self._done, done), (self._dead, dead)):
            for task, of in enumerate(flags):
                np.add.at(counts[task], numbers[named & of], -1)
        for task, of in enumerate(done):
            np.add.at(self._past[task], numbers[named & of], 1)
            self._pass(task, numbers[named])

    def gone(self, numbers: Index, dropped: Flags) -> None:
        """Count a row of each group as removed: it was dropped, or done by all tasks."""
        if not self._names:
            return
        dropped, numbers = dropped[numbers >= 0], numbers[numbers >= 0]
        finished = numbers[~dropped]
        np.add.at(self._members, finished, -1)
        for done in self._done:
            np.add.at(done, finished, -1)
        self._leave(numbers)

    def lose(self, numbers: Index, done: Flags, dead: Flags) -> None:
        """Count a row of each group as never appended. `done` and `dead` as for `drop`."""
        named = numbers >= 0
        np.add.at(self._members, numbers[named], -1)
        for counts, flags in ((self._done, done), (self._dead, dead)):
            for task, of in enumerate(flags):
                np.add.at(counts[task], numbers[named & of], -1)
        self._leave(numbers[named])

    def _leave(self, numbers: Index) -> None:
        np.add.at(self._left, numbers, -1)
        for number in np.unique(numbers[self._left[numbers] == 0]).tolist():
            del self._numbers[self._names.pop(number)]
            self._free.append(number)
            self._dropped[number] = self._past[:, number] = 0

    def number(self, name: Any) -> int | None:
        """The number of this group; None if it has no rows."""
        return self._numbers.get(name)

    def state(self, numbers: Index) -> tuple[Index, list[Any], list[tuple[int, list[int]]]]:
        """For rows of these groups: the position of each row's group among the names (-1: none); the names, by first
        row; and for each group with dropped rows, its position and the number that counts for each task."""
        found, first, which = np.unique(numbers, return_index=True, return_inverse=True)
        named = np.flatnonzero(found >= 0)
        listed = named[np.argsort(first[named], kind="stable")]
        place = np.full(len(found), -1)
        place[listed] = np.arange(len(listed))
        counts = (self._dropped[found[listed]] - self._past[:, found[listed]]).T
        drops = [(at, counts[at].tolist()) for at in np.flatnonzero(counts.any(axis=1)).tolist()]
        return place[which], self.names(found[listed]), drops

    def restore(
        self,
        rows: Index,
        which: Index,
        names: Sequence[Any],
        drops: Iterable[tuple[int, Sequence[int]]],
        dropped: Flags,
        done: Flags,
        dead: Flags,
    ) -> Index:
        """Rebuild the groups of rows from the result of `state`. Returns the numbers of the groups. `done` and
        `dead` are [tasks, rows]."""
        listed = np.fromiter(map(self._number, names), np.int64, len(names))
        numbers, named = -1 - rows, which >= 0
        numbers[named] = listed[which[named]]
        np.add.at(self._left, numbers[named], 1)
        members = named & ~dropped
        np.add.at(self._members, numbers[members], 1)
        for counts, flags in ((self._done, done), (self._dead, dead)):
            for task, of in enumerate(flags):
                np.add.at(counts[task], numbers[members & of], 1)
        for at, counted in drops:
            self._dropped[listed[at]] = max(counted)
            self._past[:, listed[at]] = max(counted) - np.asarray(counted)
        return numbers

    def names(self, numbers: Index) -> list[Any]:
        """The names of these groups; None for a row without one."""
        if not self._names:
            return [None] * len(numbers)
        return list(map(self._names.get, numbers.tolist()))

    def copy(self) -> GroupCounts:
        """A copy of the names and of the counts of dropped rows."""
        copied = GroupCounts(0)
        copied._names, copied._dropped, copied._past = dict(self._names), self._dropped.copy(), self._past.copy()
        return copied
