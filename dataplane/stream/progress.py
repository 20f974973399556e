"""The progress of each task with each row. A row goes through the tasks independently:

    pending ──leased──> leased ──acked──> done        expired: too old for the sampler, or of an incomplete group
       ^                  │                           dead: given back `max_deliveries` times
       └── lease ended ───┘

and is removed when each task is done with it (acked or expired), or when it was dropped and is not leased. A dead row
stays until it is dropped or retried, so that users can inspect it.

Invariants: a row has one state for each task; the rows counted as left for a task are those pending or leased; dropped
ones count until they are removed.

Only the leader knows the leases. For other replicas a leased row is pending, and its delivery is counted when the row
is given back: `give_back` and `settle` have the same result whether a row is leased here or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.stream.page import NONE, Flags, Index, Page, counted
from dataplane.stream.rows import Places, StreamRows

PENDING, LEASED, ACKED, EXPIRED, DEAD = range(5)
REDELIVERED = 5  # a count of `counts` that is no state: leases of rows that had been leased before
_COUNTS = 6  # the states, and REDELIVERED
STATES = ("pending", "leased", "acked", "expired", "dead")


class StreamProgress:
    """The progress of all rows of a stream, which are in the pages of `rows`."""

    def __init__(self, rows: StreamRows, tasks: int) -> None:
        self._rows = rows
        self._tasks = tasks
        self.left: list[dict[int, int]] = [{} for _ in range(tasks)]
        """By task: the number of rows left to do, by policy version."""
        self.counts = [[0] * _COUNTS for _ in range(tasks)]
        """By task and state: how often a row entered the state since the stream began; it never decreases, except for
        leases that count as no delivery. The last entry is REDELIVERED."""

    # appending

    def enter(self, versions: Index) -> None:
        """Add new rows of these versions, pending for each task."""
        arrived = {versions.item(): 1} if len(versions) == 1 else counted(versions)
        for left in self.left:
            _more(left, arrived)

    # delivering

    def ready(self, task: int, columns: tuple[str, ...], most: int) -> Index:
        """The first `most` rows that are pending for the task and have all these columns, ascending."""
        need = self._rows.schema.mask(columns)
        if need is None:  # one of the columns has never been added
            return NONE
        found: list[Index] = []
        count = 0
        asked = (task, int(need))
        for page in self._rows.pages.values():
            if page.idle.get(asked) == page.changes:
                continue
            flags = (page.columns[: page.count] & need) == need
            flags &= page.state[task, : page.count] == PENDING
            flags &= ~(page.gone[: page.count] | page.dropped[: page.count])
            rows = np.flatnonzero(flags)
            if not len(rows):
                page.idle[asked] = page.changes
                continue
            found.append(rows[: most - count] + page.first)  # a lease keeps the array: no view of a larger one
            count += len(rows)
            if count >= most:
                break
        return np.concatenate(found) if found else NONE

    def blocked(self, task: int, asked: Mapping[int, tuple[str, ...]]) -> Index:
        """The rows that are pending for the task and that no task can continue. `asked`: by task, the columns that it
        asks for. Each of these rows is a dead letter of a task, is leased to none, and lacks a column of each task for
        which it is pending."""
        needs = {of: self._rows.schema.mask(columns) for of, columns in asked.items()}
        found: list[Index] = []
        for page in self._rows.pages.values():
            if page.dead:
                states = page.state[:, : page.count]
                flags = (states == DEAD).any(axis=0) & (states != LEASED).all(axis=0)
                flags &= (states[task] == PENDING) & page.present & ~page.dropped[: page.count]
                for of in range(self._tasks):
                    pending, need = states[of] == PENDING, needs.get(of, np.uint64(0))
                    if need is not None:  # else no row has one of the columns
                        flags &= ~pending | ((page.columns[: page.count] & need) != need)
                found.append(np.flatnonzero(flags) + page.first)
        return np.concatenate(found) if found else NONE

    def open_to(self, task: int, columns: tuple[str, ...] | None) -> int:
        """The number of rows that are leased to the task, or pending with all of these columns. None: with any
        columns."""
        need = np.uint64(0) if columns is None else self._rows.schema.mask(columns)
        total = 0
        for page in self._rows.pages.values():
            there = page.present
            state = page.state[task, : page.count]
            flags = state == LEASED
            if need is not None:
                flags |= (state == PENDING) & ((page.columns[: page.count] & need) == need)
            total += int(np.count_nonzero(flags & there & ~page.dropped[: page.count]))
        return total

    def still_ready(self, task: int, columns: tuple[str, ...], rows: Index) -> Index:
        """The rows among these that are ready now, without duplicates."""
        rows = rows[np.sort(np.unique(rows, return_index=True)[1])]
        need = self._rows.schema.mask(columns)
        if need is None:
            return rows[:0]
        rows = rows[self._rows.there(rows)]
        fine = np.zeros(len(rows), np.bool_)
        for page, inside, chosen in self._rows.places(rows):
            fine[chosen] = (
                ((page.columns[inside] & need) == need) & (page.state[task, inside] == PENDING) & ~page.dropped[inside]
            )
        return rows[fine]

    def lease(self, task: int, places: Places) -> None:
        for page, inside, _ in places:
            page.state[task, inside] = LEASED
            again = page.tries[task, inside]
            page.tries[task, inside] = again + 1
            self.counts[task][LEASED] += len(inside)
            self.counts[task][REDELIVERED] += int(np.count_nonzero(again))

    def reserve(self, task: int, places: Places) -> None:
        """Withhold ready rows from delivery while a decision about them is made or in flight."""
        for page, inside, _ in places:
            ready = page.state[task, inside] == PENDING
            page.state[task, inside[ready]] = LEASED
            page.tries[task, inside[ready]] += 1

    def unlease(self, places: Places, task: int | None = None) -> None:
        """Undo the leases of these rows, for one task or all, without counting a delivery."""
        tasks = slice(None) if task is None else slice(task, task + 1)
        for page, inside, _ in places:
            leased = page.state[tasks, inside] == LEASED
            if leased.any():
                page.state[tasks, inside] = np.where(leased, PENDING, page.state[tasks, inside])
                page.tries[tasks, inside] -= leased
                page.changes += 1

    def open(self, task: int, places: Places, count: int) -> Flags:
        """Flags of the rows that are pending or leased for the task."""
        flags = np.zeros(count, np.bool_)
        for page, inside, chosen in places:
            states = page.state[task, inside]
            flags[chosen] = (states == PENDING) | (states == LEASED)
        return flags

    def unseen(self, task: int, places: Places) -> None:
        """Do not count the current leases of these rows as tries or deliveries."""
        for page, inside, _ in places:
            page.tries[task, inside] -= 1
            self.counts[task][LEASED] -= len(inside)
            self.counts[task][REDELIVERED] -= int(np.count_nonzero(page.tries[task, inside]))

    def give_back(self, task: int, places: Places, versions: Index, most: int) -> tuple[Flags, Flags]:
        """Make leased rows pending or, after `most` tries, dead. Returns two flags for each row: whether it is dead
        now, and whether it was dropped."""
        dead, dropped = np.zeros(len(versions), np.bool_), np.zeros(len(versions), np.bool_)
        for page, inside, chosen in places:
            page.tries[task, inside] += page.state[task, inside] == PENDING
            dead[chosen] = page.tries[task, inside] >= most
            dropped[chosen] = page.dropped[inside]
            page.state[task, inside] = np.where(dead[chosen], DEAD, PENDING)
            page.dead = page.dead or bool(dead[chosen].any())
            page.changes += 1
        self._done(task, versions[dead], DEAD)
        return dead, dropped

    def retry(self, task: int, places: Places, versions: Index) -> None:
        """Make dead rows of these versions pending, as if they had never been leased."""
        for page, inside, _ in places:
            page.state[task, inside], page.tries[task, inside] = PENDING, 0
            page.changes += 1
        _more(self.left[task], counted(versions))

    def settle(self, task: int, places: Places, versions: Index, state: int) -> tuple[Flags, Flags]:
        """Set the state of rows of these versions to ACKED or EXPIRED for the task. Returns two flags for each row:
        whether all tasks have acked it or let it expire, and whether it was dropped."""
        finished, dropped = np.zeros(len(versions), np.bool_), np.zeros(len(versions), np.bool_)
        for page, inside, chosen in places:
            page.state[task, inside] = state
            states = page.state[:, inside]
            finished[chosen] = ((states == ACKED) | (states == EXPIRED)).all(axis=0)
            dropped[chosen] = page.dropped[inside]
        self._done(task, versions, state)
        return finished, dropped

    def _done(self, task: int, versions: Index, state: int) -> None:
        """Count rows of these versions as no longer left for the task."""
        _less(self.left[task], versions)
        self.counts[task][state] += len(versions)

    def date(self, place: tuple[Page, int], before: int, version: int) -> None:
        """Change the policy version of a row in the counts."""
        states = place[0].state[:, place[1]]
        for left, state in zip(self.left, states.tolist(), strict=True):
            if state in (PENDING, LEASED):
                _less(left, np.array([before]))
                left[version] = left.get(version, 0) + 1

    def is_left(self, task: int) -> int:
        """Number of rows left to do for the task."""
        return sum(self.left[task].values())

    # dropping

    def drop(self, places: Places, count: int) -> Flags:
        """Drop rows. Returns flags of the rows that were not dropped before."""
        fresh = np.zeros(count, np.bool_)
        for page, inside, chosen in places:
            fresh[chosen] = ~page.dropped[inside]
            page.dropped[inside] = True
            page.changes += 1
        return fresh

    def let_go(self, places: Places, versions: Index) -> None:
        """Count dropped rows that are not leased as no longer left for any task."""
        for page, inside, chosen in places:
            unheld = (page.state[:, inside] != LEASED).all(axis=0)
            for task in range(self._tasks):
                pending = unheld & (page.state[task, inside] == PENDING)
                page.state[task, inside[pending]] = EXPIRED
                self._done(task, versions[chosen[pending]], EXPIRED)

    def lose(self, places: Places, versions: Index) -> None:
        """Count rows without leases as no longer left for the tasks that have not done them."""
        for page, inside, chosen in places:
            for left, state in zip(self.left, page.state[:, inside], strict=True):
                _less(left, versions[chosen[state == PENDING]])

    def dropped(self, places: Places, count: int) -> Flags:
        flags = np.zeros(count, np.bool_)
        for page, inside, chosen in places:
            flags[chosen] = page.dropped[inside]
        return flags

    # queries

    def states(self, places: Places, count: int) -> npt.NDArray[np.uint8]:
        """The state of each row for each task, [tasks, rows]."""
        found = np.zeros((self._tasks, count), np.uint8)
        for page, inside, chosen in places:
            found[:, chosen] = page.state[:, inside]
        return found

    def tries(self, places: Places, count: int) -> npt.NDArray[np.uint8]:
        """The number of leases of each row to each task, [tasks, rows]."""
        found = np.zeros((self._tasks, count), np.uint8)
        for page, inside, chosen in places:
            found[:, chosen] = page.tries[:, inside]
        return found

    def in_state(self, task: int, state: int) -> Index:
        """The rows in this state for the task, ascending. Dropped rows are in no state but LEASED."""
        found = []
        for page in self._rows.pages.values():
            flags = (page.state[task, : page.count] == state) & page.present
            if state != LEASED:
                flags &= ~page.dropped[: page.count]
            found.append(np.flatnonzero(flags) + page.first)
        return np.concatenate(found) if found else NONE

    def tally(self, task: int) -> dict[str, int]:
        """The number of rows in each state. Dropped rows are neither pending nor dead."""
        total = np.zeros(len(STATES), np.int64)
        for page in self._rows.pages.values():
            state, dropped = page.state[task, : page.count], page.dropped[: page.count]
            gone = dropped & ((state == PENDING) | (state == DEAD))
            total += np.bincount(state[page.present & ~gone], minlength=len(STATES))
        return dict(zip(STATES, total.tolist(), strict=True))

    def restore(self, places: Places, versions: Index, states: npt.NDArray[Any], tries: npt.NDArray[Any]) -> None:
        """Restore rows: their states and tries, both [tasks, rows]."""
        for page, inside, chosen in places:
            page.state[:, inside], page.tries[:, inside] = states[:, chosen], tries[:, chosen]
            page.dead = page.dead or bool((states[:, chosen] == DEAD).any())
        for left, of in zip(self.left, states, strict=True):
            _more(left, counted(versions[of == PENDING]))

    def mark_dropped(self, places: Places, flags: Flags) -> None:
        """Mark the rows whose flag is set as dropped."""
        for page, inside, chosen in places:
            page.dropped[inside] = flags[chosen]

    def copy(self, rows: StreamRows) -> StreamProgress:
        """A copy, for a copy of the rows."""
        copied = StreamProgress(rows, self._tasks)
        copied.left = [left.copy() for left in self.left]
        copied.counts = [counts.copy() for counts in self.counts]
        return copied


def _more(left: dict[int, int], arrived: dict[int, int]) -> None:
    for version, count in arrived.items():
        left[version] = left.get(version, 0) + count


def _less(left: dict[int, int], versions: Index) -> None:
    for version, count in counted(versions).items():
        left[version] -= count
        if not left[version]:
            del left[version]
