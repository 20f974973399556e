"""Which nodes are lost, and what of them is there again."""

from __future__ import annotations

from dataplane.replication.lost_nodes import ALL, MAX_LOST, LostNodes

NODE = b"node-one"


def test_a_node_that_comes_back_has_what_it_stores_from_then_on() -> None:
    lost = LostNodes()
    assert not lost
    lost.lose(NODE)
    assert NODE in lost
    assert lost.has(NODE, 7)
    lost.come_back(NODE, 5)
    assert NODE not in lost
    assert [lost.has(NODE, shard) for shard in (4, 5)] == [True, False]
    again = LostNodes(lost.state())
    assert [again.has(NODE, shard) for shard in (4, 5)] == [True, False]
    again.lose(NODE)
    assert NODE in again
    assert again.has(NODE, 5)


def test_a_node_that_comes_back_as_the_same_process_has_all() -> None:
    lost = LostNodes([(NODE, ALL)])
    lost.come_back(NODE, 0)
    assert not lost
    lost.come_back(NODE, 9)
    assert not lost, "it was not away"


def test_the_last_ones_are_remembered() -> None:
    lost = LostNodes()
    for number in range(MAX_LOST + 1):
        lost.lose(number.to_bytes(8, "big"))
    assert len(lost.state()) == len(lost.away) == MAX_LOST
    assert (0).to_bytes(8, "big") not in lost
