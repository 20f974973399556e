"""How many rows groups have, as they come, are dropped, die and go."""

from __future__ import annotations

import numpy as np

from dataplane.stream.groups import Groups


def sizes(groups: Groups, numbers: np.ndarray, task: int | None = None) -> list[tuple[int, int]]:
    return list(zip(*(counts.tolist() for counts in groups.sizes(numbers, task)), strict=True))


def test_rows_without_a_group_have_one_of_their_own() -> None:
    groups = Groups(1)
    numbers = groups.enter(None, np.array([0, 7]))
    assert numbers.tolist() == [-1, -8]
    groups.drop(numbers)
    assert sizes(groups, numbers) == [(1, 0), (1, 0)]
    assert groups.names(numbers) == [None, None]
    groups.gone(numbers)
    assert groups.open == 0


def test_dropped_rows_are_counted_apart() -> None:
    groups = Groups(1)
    numbers = groups.enter(["g", 7, "g"], np.arange(3))
    groups.drop(numbers[:1])
    assert sizes(groups, numbers) == [(1, 1), (1, 0), (1, 1)]
    assert groups.names(numbers) == ["g", 7, "g"]


def test_a_row_that_is_dead_for_one_task_is_there_for_another() -> None:
    groups = Groups(2)
    numbers = groups.enter(["g", "g"], np.arange(2))
    groups.dead(0, numbers[:1])
    assert sizes(groups, numbers[:1], 0) == [(1, 1)]
    assert sizes(groups, numbers[:1], 1) == [(2, 0)]
    groups.drop(numbers[:1])
    groups.dead(0, numbers[:1], -1)
    assert sizes(groups, numbers[:1], 0) == sizes(groups, numbers[:1], 1) == [(1, 1)]


def test_a_number_is_given_again_with_nothing_left_of_the_group_before() -> None:
    groups = Groups(1)
    numbers = groups.enter(["g", "g"], np.arange(2))
    groups.drop(numbers[:1])
    groups.dead(0, numbers[1:])
    groups.gone(numbers[:1])
    assert groups.open == 1
    groups.gone(numbers[1:])
    again = groups.enter(["h"], np.array([2]))
    assert again[0] == numbers[0]
    assert sizes(groups, again, 0) == [(1, 0)]
    assert groups.names(again) == ["h"]


def test_there_may_be_many_groups() -> None:
    groups = Groups(2)
    numbers = groups.enter(list(range(1000)), np.arange(1000))
    groups.dead(1, numbers)
    assert len(set(numbers.tolist())) == 1000
    assert sizes(groups, numbers, 1) == [(0, 1)] * 1000
    groups.gone(numbers)
    assert groups.open == 0
