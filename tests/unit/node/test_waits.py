"""What requests that wait keep: how much that is, and that clients share a bound."""

from __future__ import annotations

import pytest

from dataplane.errors import LimitExceeded
from dataplane.node.waits import Waits


def test_clients_share_a_bound_and_each_has_a_part_of_its_own() -> None:
    waits = Waits(bound=1000, share=100)
    greedy, modest = waits.client(), waits.client()
    greedy.take(1000)
    with pytest.raises(LimitExceeded) as caught:
        greedy.take(1)
    assert (caught.value.asked, caught.value.limit) == (1001, 1000)
    modest.take(100)
    with pytest.raises(LimitExceeded):
        modest.take(1)
    assert (greedy.nbytes, modest.nbytes, waits.nbytes) == (1000, 100, 1100)
    greedy.give_back(500)
    modest.take(300)
    for client in (greedy, modest):
        client.give_back(client.nbytes)
    assert waits.nbytes == 0


def test_what_was_kept_meanwhile_is_given_back_whatever_happens() -> None:
    waits = Waits()
    client = waits.client()
    with pytest.raises(ZeroDivisionError), client.keep(10):
        assert waits.nbytes == 10
        raise ZeroDivisionError
    assert waits.nbytes == 0
