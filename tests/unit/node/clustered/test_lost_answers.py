"""Rows that were given to who was never told of it: their answer was lost on its way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dataplane.errors import NotReady
from dataplane.node.partitions import deliveries
from dataplane.wire import messages as m
from dataplane.wire.partition_messages import Answered, Frame, Given, Received
from tests.unit.node.clustered.readers import ReaderBench, ids, readers
from tests.unit.node.clustered.test_cancelled import held
from tests.unit.node.clustered.test_stream_promises import a_group_of
from tests.unit.node.partitions.bench import until
from tests.unit.node.partitions.test_returning import absent, back


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "CONFIRM_S", 0.05)


def losing(node: ReaderBench, *kinds: type, times: int = 1) -> list[Any]:
    """What the node loses of what it is sent: so many items of each of these kinds."""
    receive, lost = node.receive, list[Any]()

    def heard(frame: Frame) -> None:
        items = []
        for item in frame.items:
            gives = not isinstance(item, Answered) or len(item.result) > 1
            if isinstance(item, kinds) and gives and sum(type(each) is type(item) for each in lost) < times:
                lost.append(item)
            else:
                items.append(item)
        receive(Frame(frame.node, frame.life, frame.to, items))

    node.receive = heard  # type: ignore[method-assign]
    return lost


def unconfirmed(nodes: list[ReaderBench]) -> int:
    return sum(len(node.replicas._deliveries) for node in nodes)


async def test_rows_whose_answer_was_lost_are_given_to_others_at_once() -> None:
    async with readers(2) as nodes:
        node, leader = nodes
        lost = losing(node, Answered, times=1 << 20)
        await leader.put(range(4))
        with pytest.raises(NotReady):
            await node.reader().take(4, 0.3)
        assert lost
        given = await leader.reader().take(4)
        assert ids(given) == [0, 1, 2, 3]


async def test_who_waits_for_an_answer_that_was_lost_asks_again() -> None:
    async with readers(2) as nodes:
        node, leader = nodes
        lost = losing(node, Answered)
        await leader.put(range(4))
        given = await node.reader().take(4, 2.0)
        assert (len(lost), ids(given)) == (1, [0, 1, 2, 3])
        assert held(nodes) == 1


async def test_what_has_come_is_kept_though_the_confirmation_is_lost() -> None:
    async with readers(2) as nodes:
        node, leader = nodes
        asked, told = losing(node, Given, times=3), losing(leader, Received, times=3)
        await leader.put(range(4))
        client = node.reader()
        given = await client.take(4)
        await until(lambda: not unconfirmed(nodes))
        assert (len(asked), len(told)) == (3, 3)
        assert held(nodes) == 1
        await client.settle(given)
        assert leader.machine(leader.own.key).home.books.rows.count == 0


async def test_a_node_that_is_away_for_a_moment_loses_nothing_that_it_is_given() -> None:
    """What it is answered while it is no member does not reach it."""
    async with readers(3) as nodes:
        away, leader, third = nodes
        waiting = asyncio.ensure_future(away.reader().take(4, 1.0))
        await until(lambda: len(leader.replicas.find(leader.own.key).waiters))  # type: ignore[union-attr]
        await absent(away, [leader, third])
        await leader.put(range(4))
        await until(lambda: held(nodes) or waiting.done())
        await back(away, [leader, third])
        given = (await asyncio.gather(waiting, return_exceptions=True))[0]
        if isinstance(given, BaseException):
            assert isinstance(given, NotReady)
            given = await leader.reader().take(4)
        assert ids(given) == [0, 1, 2, 3]


async def test_room_whose_answer_was_lost_is_there_for_others() -> None:
    async with readers(2, max_rows=8) as nodes:
        node, leader = nodes
        group = await a_group_of(leader, node)
        lost = losing(node, Answered, times=1 << 20)
        admit = m.Admit(1, b"", 4, 32, 0, "", b"", 0.0, [group] * 4, [], False, [])
        asking = asyncio.ensure_future(node.reader().ask(admit, 60.0))
        await until(lambda: lost)
        asking.cancel()
        await until(lambda: not held(nodes))


async def test_nothing_is_kept_of_what_a_node_was_given_that_has_ended() -> None:
    async with readers(3) as nodes:
        node, leader = nodes[0], nodes[1]
        losing(node, Given, times=1 << 20)
        await leader.put(range(4))
        await node.reader().take(4)
        assert unconfirmed(nodes) == 1
        await node.aclose()
        await until(lambda: not unconfirmed(nodes[1:]))
