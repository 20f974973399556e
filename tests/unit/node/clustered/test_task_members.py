"""Task members whose replicas are on several hosts: each replica is given the same, whatever is lost on the way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dataplane.clock import Deadline
from dataplane.errors import LeaseExpired, OutcomeUnknown, PeerUnavailable
from dataplane.node.clustered import session as sessions
from dataplane.node.clustered.task_members import member_node
from dataplane.node.partitions.table import Table
from dataplane.stream import requests as r
from dataplane.wire import messages as m
from dataplane.wire import peer_messages as pm
from tests.unit.node.clustered.readers import TASK, Client, ReaderBench, consume, ids, look, readers
from tests.unit.node.partitions.bench import WAIT_S, until

HOW: dict[str, Any] = {"member": "dp0", "replicas": 3}


def giver(nodes: list[ReaderBench], member: str = "dp0") -> ReaderBench:
    """The node that gives rows to a member."""
    name = member_node(nodes[0].stream.table, TASK, member)
    return next(node for node in nodes if node.name == name)


async def given(clients: list[Client], rows: int = 4, **how: Any) -> list[m.Delivered]:
    """What all replicas are given next, asked at the same time."""
    taking = [client.take(rows, replica=at, **(HOW | how)) for at, client in enumerate(clients)]
    return list(await asyncio.gather(*taking))


async def test_replicas_on_all_hosts_are_given_the_same_in_the_same_order() -> None:
    async with readers(3) as nodes:
        for number, node in enumerate(nodes):
            await node.put(range(4 * number, 4 * number + 4))
        clients = [node.reader() for node in nodes]
        seen: list[list[int]] = [[], [], []]
        for _ in range(3):
            deliveries = await given(clients, 4, min_rows=4)
            for at, (client, delivery) in enumerate(zip(clients, deliveries, strict=True)):
                seen[at] += ids(delivery)
                await client.ask(m.Renew(1, b"", delivery.grant, at))
                await client.settle(delivery)
        assert seen[0] == seen[1] == seen[2]
        assert sorted(seen[0]) == list(range(12))
        assert all(node.machine(node.own.key).home.books.rows.count == 0 for node in nodes)


def test_a_member_is_given_to_by_one_node_whoever_joins() -> None:
    table = Table(0, "rollouts", "a1", b"", 1, first=3).extended(["n0", "n1", "n2"])
    members = [f"dp{number}" for number in range(64)]
    before = [member_node(table, TASK, member) for member in members]
    assert set(before) == {"n0", "n1", "n2"}
    wider = table.extended(["n3", "n4"])
    assert [member_node(wider, TASK, member) for member in members] == before
    without = [member_node(wider.draining(1), TASK, member) for member in members]
    assert all(now == then for now, then in zip(without, before, strict=True) if then != "n1")
    assert set(without) == {"n0", "n2"}
    last = wider.draining(0).draining(1).draining(2)
    assert {member_node(last, TASK, member) for member in members} == {"n3", "n4"}


async def test_rows_that_one_replica_does_not_ack_go_to_others() -> None:
    async with readers(3) as nodes:
        await nodes[0].put(range(4))
        clients = [node.reader() for node in nodes]
        deliveries = await given(clients, lease_s=0.4)
        for client, delivery in list(zip(clients, deliveries, strict=True))[:2]:
            await client.settle(delivery)
        assert ids(await nodes[1].reader().take(4, min_rows=4)) == list(range(4))
        with pytest.raises(LeaseExpired):
            await clients[2].settle(deliveries[2])


async def test_an_answer_that_was_lost_is_given_again() -> None:
    async with readers(3) as nodes:
        await nodes[0].put(range(8))
        home = giver(nodes)
        node = next(node for node in nodes if node is not home)
        client = node.reader()
        request = client.node.peers.request

        async def loses(address: str, asked: Any, *args: Any) -> Any:
            answer = await request(address, asked, *args)
            if isinstance(asked, pm.ForMember):
                client.node.peers.request = request  # type: ignore[method-assign]
                raise PeerUnavailable("the connection was lost")
            return answer

        client.node.peers.request = loses  # type: ignore[method-assign]
        deliveries = [await client.take(4, replica=0, member="dp0", replicas=1) for _ in range(2)]
        assert [ids(delivery) for delivery in deliveries] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        for delivery in deliveries:
            await client.settle(delivery)


async def test_an_ack_whose_answer_was_lost_is_made_again() -> None:
    async with readers(3) as nodes:
        await nodes[0].put(range(4))
        home = giver(nodes)
        client = next(node for node in nodes if node is not home).reader()
        delivery = await client.take(4, replica=0, member="dp0", replicas=1)
        request = client.node.peers.request

        async def loses(address: str, asked: Any, *args: Any) -> Any:
            answer = await request(address, asked, *args)
            if isinstance(asked, pm.ForMember):
                client.node.peers.request = request  # type: ignore[method-assign]
                raise PeerUnavailable("the connection was lost")
            return answer

        client.node.peers.request = loses  # type: ignore[method-assign]
        await client.settle(delivery)
        assert nodes[0].machine(nodes[0].own.key).home.books.rows.count == 0


async def test_who_acks_at_a_node_that_does_not_answer_asks_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that who acks again until it is known asks no more than that."""
    monkeypatch.setattr(sessions, "ASK_S", 0.5)
    async with readers(3) as nodes:
        await nodes[0].put(range(4))
        home = giver(nodes)
        client = next(node for node in nodes if node is not home).reader()
        delivery = await client.take(4, replica=0, member="dp0", replicas=1)
        request, asked = client.node.peers.request, list[Any]()

        async def silent(address: str, message: Any, *args: Any) -> Any:
            if isinstance(message, pm.ForMember):
                asked.append(message)
                raise PeerUnavailable("nobody listens")
            return await request(address, message, *args)

        client.node.peers.request = silent  # type: ignore[method-assign]
        with pytest.raises(OutcomeUnknown):
            await client.settle(delivery)
        assert 2 <= len(asked) <= 4
        client.node.peers.request = request  # type: ignore[method-assign]
        await client.settle(delivery)


async def test_who_acks_again_while_the_first_is_under_way_waits_for_what_comes_of_it() -> None:
    """Though the leader that has counted it dies, and the next knows of no grant."""
    async with readers(3) as nodes:
        leader = nodes[1]
        [(follower, _)] = leader.at(leader.own.key).configuration.followers  # type: ignore[union-attr]
        node = next(node for node in nodes if node.name not in (follower, leader.name))
        await leader.put(range(4), ref=node.ref(4))
        members, stream, machine = node.service._task_members, node.stream, leader.machine(leader.own.key)
        asked = consume(4, replica=0, member="dp0", replicas=1)
        delivery = await members.consume("somebody", 1, asked, stream, Deadline.after(WAIT_S))
        decide = machine.decide

        def decided(request: bytes, term: int, now: float) -> Any:
            node.deaf |= isinstance(r.decode_request(request), r.Ack)  # it does not hear the answer
            return decide(request, term, now)

        machine.decide = decided  # type: ignore[method-assign]
        ack = m.Ack(1, b"", delivery.grant, 0, True, True)
        first = asyncio.create_task(members.ack("somebody", ack, stream))
        await until(lambda: machine.home.books.rows.count == 0)
        await leader.aclose()
        second = asyncio.create_task(members.ack("somebody", ack, stream))
        node.deaf = False
        await asyncio.gather(first, second)


async def test_a_delivery_whose_rows_have_gone_is_refused_also_when_it_is_acked_again() -> None:
    async with readers(1) as nodes:
        await nodes[0].put(range(4))
        members, stream = nodes[0].service._task_members, nodes[0].stream
        asked = consume(4, replica=0, member="dp0", replicas=1)
        delivery = await members.consume("somebody", 1, asked, stream, Deadline.after(WAIT_S))
        held = nodes[0].machine(nodes[0].own.key).home
        for grant in held.leases:
            held.leases.end(grant)
        for _ in range(2):
            with pytest.raises(LeaseExpired):
                await members.ack("somebody", m.Ack(1, b"", delivery.grant, 0, True, True), stream)


async def test_what_was_given_by_a_node_that_has_ended_goes_to_others() -> None:
    async with readers(3) as nodes:
        home = giver(nodes)
        others = [node for node in nodes if node is not home]
        await others[0].put(range(4))
        clients = [node.reader() for node in others]
        first, second = [
            await client.take(4, replica=at, **(HOW | {"replicas": 2})) for at, client in enumerate(clients)
        ]
        assert ids(first) == ids(second)
        await home.aclose()
        await until(lambda: all(node.members.gone(home.name) for node in others))
        with pytest.raises(LeaseExpired):
            await clients[0].settle(first)


async def test_a_replica_that_waits_for_rows_is_told_that_others_were_given_some() -> None:
    async with readers(2) as nodes:
        clients = [node.reader() for node in nodes]
        asked = look(replica=1, **HOW)
        waiting = asyncio.create_task(clients[1].ask(asked))
        taking = asyncio.create_task(clients[0].take(1, replica=0, **HOW))
        await until(lambda: giver(nodes).service._task_members._members)
        await nodes[0].put([1])
        await taking
        while (await waiting).rows:  # the row was shown to it before it was taken
            waiting = asyncio.create_task(clients[1].ask(look(replica=1, seen=waiting.result().changes, **HOW)))
        assert ids(await clients[1].take(1, replica=1, **HOW)) == [1]
