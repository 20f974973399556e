"""An ack of a delivery of several partitions counts in all or in none, whatever dies between its phases."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from dataplane.errors import LeaseExpired, Lost, NotReady, OutcomeUnknown
from dataplane.node.clustered import session as sessions
from dataplane.node.clustered.streams import Partition
from dataplane.stream import requests as r
from dataplane.wire import messages as m
from tests.cases import each_case
from tests.unit.node.clustered.readers import TASK, Client, ReaderBench, ids, readers
from tests.unit.node.partitions.bench import until

Act = Callable[[Partition], Awaitable[None]]


async def given(nodes: Sequence[ReaderBench], client: Client, *, stored: ReaderBench, rows: int = 4) -> m.Delivered:
    """A delivery of so many rows of each of these nodes' partitions, whose columns one of them stores."""
    for number, node in enumerate(nodes):
        await node.put(range(rows * number, rows * (number + 1)), ref=stored.ref(rows))
    return await client.take(rows * len(nodes), min_rows=rows * len(nodes))


def before(client: Client, kind: type[r.Request], act: Act, times: int = 1) -> list[Partition]:
    """Do something before the client's session asks the first partitions for this; those of which it was done."""
    answer, asked = client.session.answer, list[Partition]()

    async def answered(partition: Partition, request: r.Request) -> Any:
        if isinstance(request, kind) and len(asked) < times:
            asked.append(partition)
            await act(partition)
        return await answer(partition, request)

    client.session.answer = answered  # type: ignore[method-assign]
    return asked


def leader(nodes: Sequence[ReaderBench], key: str) -> ReaderBench | None:
    return next((node for node in nodes if node.at(key)), None)


def rows_left(nodes: Sequence[ReaderBench], key: str) -> int:
    """Rows of a partition, once it has a leader; -1 before."""
    found = leader(nodes, key)
    return -1 if found is None else found.machine(key).home.books.rows.count


def replicas(nodes: Sequence[ReaderBench], key: str) -> set[str]:
    """The nodes that have a partition."""
    found = leader(nodes, key)
    assert found is not None
    configuration = found.at(key).configuration  # type: ignore[union-attr]
    return {configuration.leader[0], *(name for name, _ in configuration.followers)}


@each_case("phase", [r.Prepare, r.Conclude])
async def test_a_leader_that_dies_before_it_is_asked_to_settle_makes_no_half_an_ack(phase: type[r.Request]) -> None:
    async with readers(3) as nodes:
        client, dead, left = nodes[0].reader(), nodes[2], nodes[:2]
        delivery = await given(nodes, client, stored=nodes[0])

        over = asyncio.Event()

        async def die(partition: Partition) -> None:
            if partition == asked[0]:
                await dead.aclose()
                over.set()
            await over.wait()

        asked = before(client, phase, die, times=3)
        if phase is r.Conclude:
            await client.settle(delivery)
            for node in nodes:
                await until(lambda key=node.own.key: rows_left(left, key) == 0)
        else:
            with pytest.raises(LeaseExpired):
                await client.settle(delivery)
            assert sorted(ids(await nodes[1].reader().take(12, min_rows=12))) == list(range(12))
        with pytest.raises(NotReady):
            await nodes[1].reader().take(1, 0.0)


@each_case("at", [0, 1, 2])
async def test_where_one_partition_refuses_none_counts_and_all_is_given_again(at: int) -> None:
    async with readers(3) as nodes:
        client = nodes[0].reader()
        delivery = await given(nodes, client, stored=nodes[0])
        partition, grant = client.gather._several[delivery.grant].several[at]
        asking = client.session.ask

        async def expire(_: Partition) -> None:
            await asking(partition, r.Nack(grant=grant), r.Result)

        before(client, r.Prepare, expire)
        for _ in range(2):
            with pytest.raises(LeaseExpired):
                await client.settle(delivery)
        again = await nodes[1].reader().take(12, min_rows=12)
        assert sorted(ids(again)) == list(range(12))
        assert not any(len(node.machine(node.own.key).home.prepared) for node in nodes)


async def test_a_refusal_is_told_though_another_partition_does_not_answer() -> None:
    async with readers(2) as nodes:
        client = nodes[0].reader()
        delivery = await given(nodes, client, stored=nodes[0])
        (first, grant), (second, _) = client.gather._several[delivery.grant].several
        await client.session.ask(first, r.Nack(grant=grant), r.Result)
        late = asyncio.Event()

        async def wait(partition: Partition) -> None:
            if partition == second:
                await late.wait()

        before(client, r.Prepare, wait, times=2)
        with pytest.raises(LeaseExpired):
            await client.settle(delivery)
        assert ids(await nodes[1].reader().take(4)) == ids(delivery)[:4]
        late.set()
        assert ids(await nodes[1].reader().take(4)) == ids(delivery)[4:]


async def test_a_client_that_goes_before_all_have_prepared_has_acked_nothing() -> None:
    async with readers(2) as nodes:
        client, never = nodes[0].reader(), asyncio.Event()
        delivery = await given(nodes, client, stored=nodes[0])
        (first, _), (second, _) = client.gather._several[delivery.grant].several
        machines = {node.own: node.machine(node.own.key) for node in nodes}

        async def wait(partition: Partition) -> None:
            if partition == second:
                await never.wait()

        before(client, r.Prepare, wait, times=2)
        acking = asyncio.create_task(client.settle(delivery))
        await until(lambda: len(machines[first].home.prepared))
        acking.cancel()
        client._client.streams.leave()
        assert sorted(ids(await nodes[1].reader().take(8, min_rows=8))) == list(range(8))
        await until(lambda: client.session.client not in machines[first].sessions.producers)
        assert isinstance((await asyncio.gather(acking, return_exceptions=True))[0], asyncio.CancelledError)


async def test_a_client_that_goes_after_all_have_prepared_has_acked_all() -> None:
    async with readers(2) as nodes:
        client, prepared, gone = nodes[0].reader(), asyncio.Event(), asyncio.Event()
        delivery = await given(nodes, client, stored=nodes[0])

        router = nodes[0].router
        ask = router.ask

        async def asked(key: str, body: bytes, *args: Any, **how: Any) -> bytes:
            if isinstance(r.decode_request(body), r.Conclude):
                prepared.set()
                await gone.wait()
            return await ask(key, body, *args, **how)

        router.ask = asked  # type: ignore[method-assign, assignment]
        acking = asyncio.create_task(client.settle(delivery))
        await prepared.wait()
        acking.cancel()
        client._client.streams.leave()
        gone.set()
        for node in nodes:
            machine = node.machine(node.own.key)
            await until(lambda machine=machine: client.session.client not in machine.sessions.producers)
            assert machine.home.books.rows.count == 0


async def test_a_node_that_dies_between_gives_back_what_it_has_prepared() -> None:
    async with readers(3) as nodes:
        client, left = nodes[0].reader(), nodes[1:]
        delivery = await given(left, client, stored=nodes[1])

        async def never(partition: Partition) -> None:
            await asyncio.Event().wait()

        before(client, r.Conclude, never, times=2)
        acking = asyncio.create_task(client.settle(delivery))
        machines = [node.machine(node.own.key) for node in left]
        await until(lambda: all(len(machine.home.prepared) for machine in machines))
        with pytest.raises(NotReady):
            await nodes[1].reader().take(1, 0.0)
        await nodes[0].aclose()
        assert sorted(ids(await nodes[1].reader().take(8, min_rows=8))) == list(range(8))
        acking.cancel()
        await asyncio.gather(acking, return_exceptions=True)


@each_case("phase", [r.Prepare, r.Conclude])
async def test_where_an_answer_is_lost_to_ack_again_settles_it(
    phase: type[r.Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "ASK_S", 0.3)
    async with readers(3) as nodes:
        left, client = nodes[1:], nodes[0].reader()
        delivery = await given(left, client, stored=nodes[0])

        async def lose(partition: Partition) -> None:
            nodes[0].deaf = True

        asked = before(client, phase, lose)
        with pytest.raises(OutcomeUnknown):
            await client.settle(delivery)
        with pytest.raises(OutcomeUnknown):  # nor is it given back then
            await client.settle(delivery, done=False)
        await client.ask(m.Renew(1, b"", delivery.grant, None))
        nodes[0].deaf = False
        while True:
            try:
                await client.settle(delivery)
                break
            except OutcomeUnknown:
                continue
        assert len(asked) == 1
        assert [rows_left(nodes, node.own.key) for node in left] == [0, 0]


async def test_rows_that_are_lost_between_count_for_who_acked_them_and_are_named_for_others() -> None:
    async with readers(3, (TASK, "score")) as nodes:
        client, dead = nodes[0].reader(), nodes[2]
        await nodes[0].put(range(4))
        await nodes[1].put(range(4, 8), ref=dead.ref(4))
        delivery = await client.take(8, min_rows=8)
        machine = nodes[1].machine(nodes[1].own.key)

        async def die(partition: Partition) -> None:
            await dead.aclose()
            await until(lambda: bytes.fromhex(dead.name) in machine.lost_nodes)

        before(client, r.Conclude, die)
        await client.settle(delivery)
        assert machine.home.books.rows.count == 0
        lost = await client.session.ask(nodes[1].own, r.TakeLost(most=9), r.LostRows)
        assert [acked for *_, acked in lost.rows] == [1] * 4  # the first task has done them
        assert len(ids(await client.take(4, task="score"))) == 4


async def test_a_partition_that_is_lost_between_with_all_its_replicas_holds_up_no_ack() -> None:
    async with readers(4) as nodes:
        lost = nodes[3].own
        dead = [node for node in nodes if node.name in replicas(nodes, lost.key)]
        left = [node for node in nodes if node not in dead]
        client = left[0].reader()
        delivery = await given([left[0], nodes[3]], client, stored=left[0])

        async def die(partition: Partition) -> None:
            await asyncio.gather(*(node.aclose() for node in dead))

        before(client, r.Conclude, die)
        await client.settle(delivery)
        await until(lambda: rows_left(left, left[0].own.key) == 0)
        with pytest.raises(Lost):
            await client.session.ask(lost, r.TakeLost(most=9), r.LostRows)


async def test_an_ack_is_one_request_to_one_partition_and_two_to_each_of_several() -> None:
    async with readers(2) as nodes:
        client, router, asked = nodes[0].reader(), nodes[0].router, list[type]()
        ask = router.ask

        async def counted(key: str, body: bytes, *args: Any, **how: Any) -> bytes:
            asked.append(type(r.decode_request(body)))
            return await ask(key, body, *args, **how)

        several = await given(nodes, client, stored=nodes[0])
        await nodes[1].put(range(4))
        one = await client.take(4)
        router.ask = counted  # type: ignore[method-assign, assignment]
        await client.settle(one)
        assert asked == [r.Ack]
        await client.settle(several)
        assert asked[1:] == [r.Prepare, r.Prepare, r.Conclude, r.Conclude]


async def test_replicas_of_a_member_settle_an_ack_whose_answer_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "ASK_S", 0.3)
    async with readers(2) as nodes:
        for number, node in enumerate(nodes):
            await node.put(range(4 * number, 4 * number + 4))
        clients = [node.reader() for node in nodes]
        how = {"min_rows": 8, "member": "dp0", "replicas": 2}
        deliveries = [await client.take(8, replica=at, **how) for at, client in enumerate(clients)]
        members = next(node.service._task_members for node in nodes if node.service._task_members._members)
        session, late = members._own()[0], asyncio.Event()
        answer = session.answer

        async def answered(partition: Partition, request: r.Request) -> Any:
            if isinstance(request, r.Conclude):
                await late.wait()
            return await answer(partition, request)

        session.answer = answered  # type: ignore[method-assign]
        await clients[0].settle(deliveries[0])
        for _ in range(2):
            with pytest.raises(OutcomeUnknown):
                await clients[1].settle(deliveries[1])
        late.set()
        await clients[1].settle(deliveries[1])
        assert all(node.machine(node.own.key).home.books.rows.count == 0 for node in nodes)
