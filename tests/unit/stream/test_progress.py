"""How far tasks are with rows: what is ready, what is counted, and when a row is over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dataplane.batch.field import Field
from dataplane.batch.ref import BatchRef
from dataplane.stream.page import PAGE
from dataplane.stream.progress import ACKED, DEAD, EXPIRED, LEASED, PENDING, REDELIVERED, Progress
from dataplane.stream.rows import Places, Rows

INT = Field("dense", "int64", ())


class Books:
    """Rows of one column, and the progress of two tasks with them."""

    def __init__(self, rows: int, version: int = 0) -> None:
        self.rows = Rows()
        self.progress = Progress(self.rows, 2)
        self.append(rows, version)

    def append(self, rows: int, version: int = 0) -> None:
        self.rows.append(BatchRef.of(b"the-node", rows, [("x", INT, 8 * rows, 1, 0)]))
        self.progress.enter(np.full(rows, version, np.int64))

    def places(self, *rows: int) -> Places:
        return self.rows.places(np.array(rows, np.int64))

    def lease(self, *rows: int, task: int = 0) -> None:
        self.progress.lease(task, self.places(*rows))

    def give_back(self, *rows: int, most: int = 5, task: int = 0) -> list[list[bool]]:
        flags = self.progress.give_back(task, self.places(*rows), np.zeros(len(rows), np.int64), most)
        return [of.tolist() for of in flags]

    def settle(self, *rows: int, task: int = 0, state: int = ACKED) -> list[list[bool]]:
        flags = self.progress.settle(task, self.places(*rows), np.zeros(len(rows), np.int64), state)
        return [of.tolist() for of in flags]

    def drop(self, *rows: int) -> list[bool]:
        flags: list[bool] = self.progress.drop(self.places(*rows), len(rows)).tolist()
        return flags

    def ready(self, task: int = 0, most: int = 1 << 40, columns: tuple[str, ...] = ("x",)) -> list[int]:
        found: list[int] = self.progress.ready(task, columns, most).tolist()
        return found

    def states(self, row: int) -> list[int]:
        found: list[int] = self.progress.states(self.places(row), 1)[:, 0].tolist()
        return found

    def tries(self, row: int) -> list[int]:
        found: list[int] = self.progress.tries(self.places(row), 1)[:, 0].tolist()
        return found


def test_each_task_goes_through_the_rows_by_itself() -> None:
    books = Books(3)
    books.lease(0, 2)
    assert (books.ready(0), books.ready(1)) == ([1], [0, 1, 2])
    assert (books.states(0), books.states(1)) == ([LEASED, PENDING], [PENDING, PENDING])


def test_a_row_is_over_when_each_task_is_done_with_it() -> None:
    books = Books(3)
    books.lease(0, 1, 2)
    assert books.settle(0, 1) == [[False, False], [False, False]]
    assert books.settle(0, 2, task=1, state=EXPIRED) == [[True, False], [False, False]]
    assert [books.progress.is_left(task) for task in range(2)] == [1, 1]
    assert [books.progress.counts[task][state] for task, state in ((0, ACKED), (1, EXPIRED))] == [2, 2]


def test_the_first_of_very_many_are_ready_in_order() -> None:
    books = Books(2 * PAGE + 5)
    assert books.ready(most=PAGE + 1) == list(range(PAGE + 1))
    books.lease(*range(PAGE))
    assert books.ready(most=3) == [PAGE, PAGE + 1, PAGE + 2]
    assert len(books.ready()) == PAGE + 5


def test_what_was_found_idle_is_looked_at_again_when_something_changes() -> None:
    books = Books(2)
    books.lease(0, 1)
    assert books.ready() == []
    books.give_back(1)
    assert books.ready() == [1]
    books.lease(1)
    assert books.ready(columns=("x", "y")) == []
    books.rows.extend(np.array([0, 1]), BatchRef.of(b"the-node", 2, [("y", INT, 16, 2, 0)]), replace=False)
    books.give_back(0)
    assert books.ready(columns=("x", "y")) == [0]
    books.lease(0)
    books.append(1)
    assert books.ready() == [2]


def test_rows_given_back_are_pending_until_they_were_tried_too_often() -> None:
    books = Books(2)
    for tries in range(1, 3):
        books.lease(0)
        assert books.tries(0) == [tries, 0]
        assert books.give_back(0, most=3) == [[False], [False]]
    books.lease(0, 1)
    assert books.give_back(0, 1, most=3) == [[True, False], [False, False]]
    assert (books.states(0), books.ready()) == ([DEAD, PENDING], [1])
    assert books.progress.in_state(0, DEAD).tolist() == [0]
    assert (books.progress.is_left(0), books.progress.is_left(1)) == (1, 2)
    assert books.progress.counts[0][REDELIVERED] == 2


def test_what_nobody_has_seen_was_no_try() -> None:
    books = Books(1)
    for _ in range(4):
        books.lease(0)
        books.progress.unseen(0, books.places(0))
        assert books.give_back(0, most=1) == [[False], [False]]
    assert books.tries(0) == [0, 0]
    books.lease(0)
    assert books.give_back(0, most=1) == [[True], [False]]


def test_a_row_may_be_tried_255_times() -> None:
    books = Books(1)
    for _ in range(254):
        books.lease(0)
        assert books.give_back(0, most=255) == [[False], [False]]
    books.lease(0)
    assert books.give_back(0, most=255) == [[True], [False]]


def test_a_row_that_is_dropped_goes_when_nobody_holds_it() -> None:
    books = Books(3)
    books.lease(1, task=1)
    assert books.drop(0, 1) == [True, True]
    assert books.drop(1, 2) == [False, True], "one was dropped before"
    assert (books.ready(0), books.ready(1)) == ([], [])
    versions = np.zeros(3, np.int64)
    assert books.progress.let_go(books.places(0, 1, 2), versions).tolist() == [True, False, True]
    assert [books.progress.is_left(task) for task in range(2)] == [1, 1], "somebody may still ack it"
    assert books.settle(1, task=1) == [[False], [True]]
    assert books.progress.let_go(books.places(1), versions[:1]).tolist() == [True]
    assert [books.progress.is_left(task) for task in range(2)] == [0, 0]
    assert books.progress.dropped(books.places(0, 1, 2), 3).all()


def test_rows_are_still_ready_that_are_pending_there_and_not_dropped() -> None:
    books = Books(5)
    books.lease(0)
    books.drop(1)
    books.rows.remove(np.array([2]))

    def still(columns: tuple[str, ...], *rows: int) -> list[int]:
        found: list[int] = books.progress.still_ready(0, columns, np.array(rows, np.int64)).tolist()
        return found

    assert still(("x",), 4, 0, 1, 2, 3, 4, 99, -1) == [4, 3]
    assert still(("x", "y"), 4) == still(("x",)) == []


def test_what_is_left_is_known_by_version() -> None:
    books = Books(2, version=3)
    books.append(1, version=7)
    assert [dict(left) for left in books.progress.left] == [{3: 2, 7: 1}] * 2
    books.progress.settle(0, books.places(0, 1), np.array([3, 3]), ACKED)
    assert [dict(left) for left in books.progress.left] == [{7: 1}, {3: 2, 7: 1}]


def test_the_tally_is_of_rows_that_are_there() -> None:
    books = Books(PAGE + 3)
    books.lease(0, 1, PAGE)
    books.settle(0)
    books.give_back(1, most=1)
    books.rows.remove(np.array([PAGE + 1, PAGE + 2]))
    expected: dict[str, Any] = {"pending": PAGE - 2, "leased": 1, "acked": 1, "expired": 0, "dead": 1}
    assert books.progress.tally(0) == expected


def test_pages_that_are_gone_are_forgotten() -> None:
    books = Books(3 * PAGE)
    books.lease(*range(3 * PAGE))
    books.rows.remove(np.arange(2 * PAGE))
    books.progress.tidy()
    assert len(books.progress._sheets) == 1
    with pytest.raises(KeyError):
        books.places(0)


def test_a_copy_does_not_change_with_what_it_was_made_of() -> None:
    books = Books(2)
    books.lease(0)
    rows = books.rows.copy()
    copied = books.progress.copy(rows)
    books.settle(0)
    books.drop(1)
    places = rows.places(np.array([0, 1]))
    assert copied.states(places, 2)[0].tolist() == [LEASED, PENDING]
    assert copied.dropped(places, 2).tolist() == [False, False]
    assert (copied.is_left(0), books.progress.is_left(0)) == (2, 1)
