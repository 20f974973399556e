"""Rows of an append over several partitions are given to nobody before all partitions have it."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.errors import Corrupt, Misuse, NotReady
from dataplane.stream import requests as r
from dataplane.stream.books import Books
from dataplane.stream.held import HeldRows
from dataplane.stream.sampler import CompleteGroups
from dataplane.stream.settings import Settings
from tests.unit.stream.test_machine import Partition


@pytest.fixture
def held() -> Partition:
    """With two rows that anybody may have, and three that are held back."""
    partition = Partition()
    partition.append(2)
    partition.append(3, held=True, client="q", groups=["a", "a", "b"], keys=["i", "j", "k"])
    return partition


def release(partition: Partition, *, keep: bool = True) -> None:
    partition.ask(r.Release(client="q", first=2, keep=keep))


def test_they_are_given_to_nobody_before_they_are_released(held: Partition) -> None:
    assert held.consume().rows.tolist() == [0, 1]
    with pytest.raises(NotReady):
        held.consume(sampler=CompleteGroups(2))
    for task in ("train", "score"):
        assert held.ask(r.Watch(task=task, columns=("x",), rows=9)).ready == (0 if task == "train" else 2)
    release(held)
    assert held.consume().rows.tolist() == [2, 3, 4]
    assert held.consume("score").rows.tolist() == [0, 1, 2, 3, 4]
    assert held.leader.home.books.progress.tries(held.leader.home.books.rows.places(np.arange(5)), 5).max() == 1


def test_those_that_are_refused_elsewhere_go_and_their_keys_are_free(held: Partition) -> None:
    release(held, keep=False)
    assert held.consume().rows.tolist() == [0, 1]
    assert held.leader.home.books.rows.count == 2
    assert held.append(3, groups=["a", "a", "b"], keys=["i", "j", "k"], digest=b"other").first == 5
    release(held)  # who asks again is answered, and nothing is done
    assert held.consume().rows.tolist() == [5, 6, 7]


def test_who_leads_next_holds_them_back_too(held: Partition) -> None:
    held.fail_over()
    assert held.consume().rows.tolist() == [0, 1]
    release(held)
    held.fail_over()
    assert held.consume(rows=3).rows.tolist() == [0, 1, 2]


def test_the_leader_shows_them_before_that_is_committed_and_the_next_does_not(held: Partition) -> None:
    command = held.decide(r.Release(client="q", first=2))
    assert isinstance(command, list)
    given = held.consume()
    assert given.rows.tolist() == [0, 1, 2, 3, 4]
    held.commit(command[0])
    held.ack(given.grant)  # that it was committed takes them from nobody
    held.append(2, held=True, client="q")
    again = held.decide(r.Release(client="q", first=5))
    assert isinstance(again, list)
    assert held.consume().rows.tolist() == [5, 6]
    held.fail_over()
    with pytest.raises(NotReady):
        held.consume()
    held.commit(again[0])
    assert held.consume().rows.tolist() == [5, 6]


@pytest.mark.parametrize("keep", [True, False])
def test_what_is_dropped_while_it_is_held_back_goes_once_it_is_not(held: Partition, keep: bool) -> None:
    held.ask(r.Drop(client="j", sequence=1, groups=["a"]))
    assert held.leader.home.books.rows.count == 5
    release(held, keep=keep)
    assert held.leader.home.books.rows.count == (3 if keep else 2)
    assert held.consume().rows.tolist() == ([0, 1, 4] if keep else [0, 1])


def test_what_is_lost_with_its_node_while_it_is_held_back_stays_so(held: Partition) -> None:
    held.ask(r.Lose(node=b"the-node"))
    assert held.leader.home.books.rows.count == 0
    release(held)
    with pytest.raises(NotReady):
        held.consume()
    with pytest.raises(Misuse):
        held.ask(r.Extend(client="e", sequence=1, ref=held.ref(1, "y"), keys=["i"]))


def test_a_state_of_rows_that_never_came_is_refused() -> None:
    with pytest.raises(ValueError, match="never came"):
        HeldRows(Books(Settings(("a",)), lambda patches: None, "m"), [(0, 1 << 40, "q")])
    state = Partition()
    state.append(1)
    state.leader.home.held._held[0] = (1 << 40, "q")
    with pytest.raises(Corrupt):
        state.machines[1].restore(state.leader.snapshot())
