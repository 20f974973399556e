"""How many rows groups have, as they come, are dropped, die and go."""

from __future__ import annotations

import numpy as np

from dataplane.stream.groups import Groups


def sizes(groups: Groups, numbers: np.ndarray, task: int = 0) -> list[tuple[int, int]]:
    return list(zip(*(counts.tolist() for counts in groups.sizes(numbers, task)), strict=True))


NEITHER, BOTH = np.array([False, False]), np.array([True, True])


def flags(tasks: int, rows: int, *dead: int) -> tuple[np.ndarray, ...]:
    """[tasks, rows], all false but for the first row of the tasks in `dead`."""
    made = np.zeros((tasks, rows), np.bool_)
    made[list(dead), 0] = True
    return (made,)


def test_rows_without_a_group_have_one_of_their_own() -> None:
    groups = Groups(1)
    numbers = groups.enter(None, np.array([0, 7]))
    assert numbers.tolist() == [-1, -8]
    groups.drop(numbers, *flags(1, 2), *flags(1, 2))
    assert sizes(groups, numbers) == [(1, 0), (1, 0)]
    assert groups.names(numbers) == [None, None]
    groups.gone(numbers, NEITHER)
    assert groups.open == 0


def test_dropped_rows_are_counted_apart() -> None:
    groups = Groups(1)
    numbers = groups.enter(["g", 7, "g"], np.arange(3))
    groups.drop(numbers[:1], *flags(1, 1), *flags(1, 1))
    assert sizes(groups, numbers) == [(1, 1), (1, 0), (1, 1)]
    assert groups.names(numbers) == ["g", 7, "g"]


def test_a_row_that_is_dead_for_one_task_is_there_for_another() -> None:
    groups = Groups(2)
    numbers = groups.enter(["g", "g"], np.arange(2))
    groups.dead(0, numbers[:1])
    assert sizes(groups, numbers[:1], 0) == [(1, 1)]
    assert sizes(groups, numbers[:1], 1) == [(2, 0)]
    groups.drop(numbers[:1], *flags(2, 1), *flags(2, 1, 0))
    assert sizes(groups, numbers[:1], 0) == sizes(groups, numbers[:1], 1) == [(1, 1)]


def test_a_number_is_given_again_with_nothing_left_of_the_group_before() -> None:
    groups = Groups(1)
    numbers = groups.enter(["g", "g"], np.arange(2))
    groups.drop(numbers[:1], *flags(1, 1), *flags(1, 1))
    groups.dead(0, numbers[1:])
    groups.gone(numbers[:1], BOTH[:1])
    assert groups.open == 1
    groups.drop(numbers[1:], *flags(1, 1), *flags(1, 1, 0))
    groups.gone(numbers[1:], BOTH[:1])
    again = groups.enter(["h"], np.array([2]))
    assert again[0] == numbers[0]
    assert sizes(groups, again, 0) == [(1, 0)]
    assert groups.names(again) == ["h"]


def test_rows_that_a_task_has_done_are_no_longer_of_the_group_to_it() -> None:
    groups = Groups(2)
    first = groups.enter(["g", "g"], np.arange(2))
    groups.done(0, first)
    again = groups.enter(["g", "g", "g"], np.arange(2, 5))
    assert sizes(groups, again[:1], 0) == [(3, 0)]
    assert sizes(groups, again[:1], 1) == [(5, 0)]
    groups.done(1, first)
    groups.gone(first, NEITHER)
    assert sizes(groups, again[:1], 0) == sizes(groups, again[:1], 1) == [(3, 0)]


def test_there_may_be_many_groups() -> None:
    groups = Groups(2)
    numbers = groups.enter(list(range(1000)), np.arange(1000))
    groups.dead(1, numbers[:500])
    assert len(set(numbers.tolist())) == 1000
    assert sizes(groups, numbers, 1) == [(0, 1)] * 500 + [(1, 0)] * 500
    groups.done(0, numbers)
    groups.done(1, numbers)
    groups.gone(numbers, np.zeros(1000, np.bool_))
    assert groups.open == 0
