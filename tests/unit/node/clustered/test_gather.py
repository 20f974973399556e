"""Deliveries over the partitions of a stream: of one where one has enough, else of several, which are acked as one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dataplane.batch.ref import BatchRef
from dataplane.errors import LeaseExpired, Misuse, NotReady
from dataplane.node.clustered.gather import IN_A_ROW
from dataplane.stream import requests as r
from dataplane.stream.sampler import CompleteGroups, Freshest
from dataplane.wire import messages as m
from tests.cases import each_case
from tests.unit.node.clustered.readers import Client, ReaderBench, ids, readers, rows_of
from tests.unit.node.partitions.bench import until


def left(nodes: list[ReaderBench]) -> int:
    """Rows that are in any partition still."""
    return sum(node.machine(node.own.key).home.books.rows.count for node in nodes)


async def given_by_all(nodes: list[ReaderBench], client: Client, rows: int = 4) -> m.Delivered:
    """A delivery of so many rows of each partition."""
    for number, node in enumerate(nodes):
        await node.put(range(rows * number, rows * (number + 1)))
    return await client.take(rows * len(nodes), min_rows=rows * len(nodes))


async def test_rows_of_several_partitions_are_one_delivery() -> None:
    async with readers(3) as nodes:
        client = nodes[1].reader()
        delivery = await given_by_all(nodes, client)
        assert (delivery.stream, sorted(ids(delivery)), rows_of(delivery)) == (
            nodes[1].stream.token,
            list(range(12)),
            12,
        )
        assert len(set(delivery.keys)) == 12
        origins = {token: rows.tolist() for token, _, rows in BatchRef.decode(delivery.ref).origins()}
        assert origins == {node.own.token: [0, 1, 2, 3] for node in nodes}
        await client.ask(m.Renew(1, b"", delivery.grant, None))
        assert left(nodes) == 12
        await client.settle(delivery)
        assert left(nodes) == 0
        with pytest.raises(LeaseExpired):
            await client.settle(delivery)


async def test_a_consumer_waits_until_all_partitions_together_have_enough() -> None:
    async with readers(3) as nodes:
        waiting = asyncio.create_task(nodes[0].reader().take(9, 600.0, min_rows=9))
        for number, node in enumerate(nodes):
            assert not waiting.done()
            await node.put([number] * 3)
        assert sorted(ids(await waiting)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


async def test_two_who_want_the_same_rows_get_them_one_after_the_other() -> None:
    async with readers(2) as nodes:
        asked = [asyncio.create_task(node.reader().take(8, min_rows=8)) for node in nodes]
        for _ in range(2):
            for node in nodes:
                await node.put(range(4))
        assert [len(ids(delivery)) for delivery in await asyncio.gather(*asked)] == [8, 8]


async def test_of_a_delivery_whose_rows_have_gone_to_others_nothing_is_acked() -> None:
    async with readers(2) as nodes:
        client = nodes[0].reader()
        delivery = await given_by_all(nodes, client)
        partition, grant = client.gather._several[delivery.grant].several[1]
        await client.session.ask(partition, r.Nack(grant=grant), r.Result)
        with pytest.raises(LeaseExpired):
            await client.settle(delivery)
        again = await nodes[1].reader().take(8, min_rows=8)
        assert sorted(ids(again)) == list(range(8))


async def test_a_delivery_of_a_leader_that_has_ended_is_not_acked() -> None:
    async with readers(3) as nodes:
        client = nodes[0].reader()
        for number, node in enumerate(nodes):  # whose columns are on a node that lives
            await node.put(range(4 * number, 4 * number + 4), ref=nodes[0].ref(4))
        delivery = await client.take(12, min_rows=12)
        await nodes[2].aclose()
        with pytest.raises(LeaseExpired):
            await client.settle(delivery)
        assert sorted(ids(await nodes[1].reader().take(12, min_rows=12))) == list(range(12))


@each_case("several", [False, True])
async def test_an_ack_that_counted_is_no_refusal_when_it_is_made_again_at_another_leader(several: bool) -> None:
    async with readers(3) as nodes:
        leader = nodes[1]
        [(follower, _)] = leader.at(leader.own.key).configuration.followers  # type: ignore[union-attr]
        node = next(node for node in nodes if node.name not in (follower, leader.name))
        client, other = node.reader(), next(node for node in nodes if node.name == follower)
        await leader.put(range(4), ref=node.ref(4))
        if several:
            await node.put(range(4, 8))
        delivery = await client.take(8 if several else 4, min_rows=8 if several else 4)
        machine = leader.machine(leader.own.key)
        decide = machine.decide

        def decided(request: bytes, term: int, now: float) -> Any:
            node.deaf |= isinstance(r.decode_request(request), r.Ack | r.Conclude)  # it does not hear the answer
            return decide(request, term, now)

        machine.decide = decided  # type: ignore[method-assign]
        acking = asyncio.create_task(client.settle(delivery))
        await until(lambda: machine.home.books.rows.count == 0)
        assert not acking.done()
        acking.cancel()
        assert isinstance((await asyncio.gather(acking, return_exceptions=True))[0], asyncio.CancelledError)
        await leader.aclose()
        node.deaf = False
        await client.settle(delivery)
        await until(lambda: other.machine(leader.own.key).home.books.rows.count == 0)


async def test_older_versions_of_other_hosts_are_given_now_and_then() -> None:
    async with readers(2) as nodes:
        for version in range(1, 2 * IN_A_ROW):
            await nodes[0].put([version], versions=[version])
        await nodes[1].put([100], versions=[0])
        client = nodes[0].reader()
        given = [ids(await client.take(1))[0] for _ in range(IN_A_ROW + 1)]
        assert given == [*range(1, IN_A_ROW + 1), 100]


async def test_the_freshest_rows_are_given_first_wherever_they_are() -> None:
    async with readers(3) as nodes:
        for number, node in enumerate(nodes):
            await node.put([number], versions=[number])
        client = nodes[0].reader()
        given = [ids(await client.take(1, sampler=Freshest(max_lag=9)))[0] for _ in nodes]
        assert given == [2, 1, 0]


async def test_groups_are_whole_in_a_delivery_of_several_partitions() -> None:
    async with readers(2) as nodes:
        for number, node in enumerate(nodes):
            await node.put(range(5), groups=[f"{number} a"] * 2 + [f"{number} b"] * 3)
        delivery = await nodes[0].reader().take(4, min_rows=4, sampler=CompleteGroups(2))
        assert sorted(delivery.groups) == ["0 a", "0 a", "1 a", "1 a"]  # type: ignore[type-var]


async def test_groups_to_which_no_other_fits_are_a_delivery() -> None:
    async with readers(2) as nodes:
        client, how = nodes[0].reader(), {"min_rows": 8, "sampler": CompleteGroups(2)}
        await nodes[1].put(range(10), groups=["a"] * 5 + ["b"] * 5)
        one = await client.take(8, 600.0, **how)
        await nodes[0].put(range(10, 15), groups=["c"] * 5)
        two = await client.take(8, 600.0, **how)  # the other does not fit beside it
        assert [ids(one), ids(two)] == [list(range(5)), list(range(10, 15))]
        with pytest.raises(Misuse, match="delivered whole"):
            await client.take(4, 600.0, **how | {"min_rows": 4})
        for delivery in (one, two):
            await client.settle(delivery)
        await nodes[0].close_all()
        assert ids(await client.take(8, 600.0, **how)) == list(range(5, 10))


async def test_the_last_group_of_a_closed_partition_waits_for_those_of_others() -> None:
    async with readers(2) as nodes:
        clients, how = [node.reader() for node in nodes], {"min_rows": 8, "sampler": CompleteGroups(2)}
        await nodes[1].put(range(5), groups=["a"] * 5)
        held = await clients[1].take(5, min_rows=5)
        await nodes[0].put(range(5, 8), groups=["b"] * 3)
        await nodes[0].close_all()
        with pytest.raises(NotReady):
            await clients[0].take(8, 0.3, **how)
        await clients[1].settle(held, done=False)
        assert sorted(ids(await clients[0].take(8, 600.0, **how))) == list(range(8))


async def test_who_waits_for_the_end_is_given_what_others_give_back() -> None:
    async with readers(2) as nodes:
        for node in nodes:
            await node.put(range(2))
        clients = [node.reader() for node in nodes]
        held = await clients[0].take(4, min_rows=4)
        await nodes[0].close_all()
        waiting = asyncio.create_task(clients[1].take(8, min_rows=8))
        await clients[0].settle(held, done=False)
        assert sorted(ids(await waiting)) == [0, 0, 1, 1]


async def test_the_turns_of_those_who_wait_are_forgotten_with_the_last() -> None:
    async with readers(1) as nodes:
        waiting = [
            asyncio.create_task(nodes[0].reader().take(rows, min_rows=2)) for rows in (2, 3, 4) for _ in range(4)
        ]
        await until(lambda: len(nodes[0].service.turns) == 3)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert len(nodes[0].service.turns) == 0
