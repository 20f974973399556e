"""An append over several partitions is in all of them, or in none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataplane.batch.field import Field
from dataplane.batch.ref import BatchRef
from dataplane.coordinator.base import Unavailable
from dataplane.coordinator.process import ProcessCoordinator
from dataplane.errors import Closed, Misuse, OutcomeUnknown, SchemaMismatch
from dataplane.node.clustered import session
from dataplane.stream import requests as r
from dataplane.wire import messages as m
from tests.unit.node.clustered.test_producer_router import GROUPS, opened
from tests.unit.node.clustered.writers import S, Writer, WriterBench, writers
from tests.unit.node.partitions.bench import WAIT_S, until

PROMPT_S = 3.0  # a few milliseconds


def of_floats(client: Writer, rows: int) -> BatchRef:
    """The columns of integers, as another dtype."""
    ref = client.put(rows)
    ((node, number),) = ref.shards()
    return BatchRef.of(node, rows, [("x", Field("dense", "float64", ()), 8 * rows, number, 0)])


def rows_in_all(nodes: list[WriterBench], client: Writer) -> int:
    partitions = client.stream.partitions
    machines = [node.machine(each.key) for each in partitions for node in nodes if node.at(each.key)]
    return sum(machine.home.books.rows.count for machine in machines)


async def test_columns_of_another_dtype_are_refused_before_any_partition_is_asked(tmp_path: Path) -> None:
    async with writers(3, tmp_path) as nodes:
        clients = await opened(nodes)
        await clients[0].append(1)  # one partition alone has a column
        with pytest.raises(SchemaMismatch, match="float64"):
            await clients[1].append(24, groups=GROUPS, ref=of_floats(clients[1], 24))
        assert rows_in_all(nodes, clients[0]) == 1
        assert (await clients[1].append(24, groups=GROUPS)).new


async def test_of_two_that_bring_a_column_at_once_one_says_what_it_is(tmp_path: Path) -> None:
    async with writers(3, tmp_path) as nodes:
        clients = await opened(nodes)
        floats = of_floats(clients[1], 24)
        outcomes = await asyncio.gather(
            clients[0].append(24, groups=GROUPS, whole=True),
            clients[1].append(24, groups=GROUPS, whole=True, ref=floats),
            return_exceptions=True,
        )
        assert sum(isinstance(each, SchemaMismatch) for each in outcomes) == 1
        assert rows_in_all(nodes, clients[0]) == 24


async def test_an_extend_of_another_dtype_is_refused_at_all_partitions(tmp_path: Path) -> None:
    async with writers(2, tmp_path) as nodes:
        clients = await opened(nodes)
        for client in clients:
            await client.append(1)
        taken = await clients[0].take(1)
        await clients[0].extend(taken, "y")
        table = nodes[1].directory.find(S)
        read = await nodes[1].directory.read(S)
        assert read is not None
        assert table is not None
        assert [name for name, _ in read.schema] == ["x", "y"]


async def test_what_one_partition_refuses_is_dropped_in_the_others(tmp_path: Path) -> None:
    async with writers(3, tmp_path) as nodes:
        clients = await opened(nodes)
        keys = [f"k{number}" for number in range(24)]
        await clients[0].append(1, groups=GROUPS[:1], keys=keys[:1])
        with pytest.raises(Misuse):
            await clients[1].append(24, groups=GROUPS, keys=keys)
        await until(lambda: rows_in_all(nodes, clients[0]) == 1)
        assert (await clients[1].append(23, groups=GROUPS[1:], keys=keys[1:])).new
        assert rows_in_all(nodes, clients[0]) == 24


async def test_nobody_is_given_a_row_of_an_append_that_one_partition_refuses(tmp_path: Path) -> None:
    """Consumers wait at all partitions meanwhile; what comes after that they are given."""
    async with writers(3, tmp_path) as nodes:
        clients = await opened(nodes)
        keys = [f"k{number}" for number in range(24)]
        await clients[0].append(1, groups=GROUPS[:1], keys=keys[:1])
        first = await clients[0].take(1)
        seen: list[int] = []

        async def consume(client: Writer) -> None:
            while len(seen) < 23:
                taken = await client.take(24)
                seen.extend(len(taken.given.rows) * [len(taken.given.keys)])
                await taken.ack()

        consuming = [asyncio.ensure_future(consume(client)) for client in clients]
        for _ in range(8):
            with pytest.raises(Misuse):
                await clients[1].append(24, groups=GROUPS, keys=keys)
        assert not seen
        assert rows_in_all(nodes, clients[0]) == 1
        assert (await clients[1].append(23, groups=GROUPS[1:], keys=keys[1:])).new
        await until(lambda: len(seen) == 23)
        for each in consuming:
            each.cancel()
        await asyncio.gather(*consuming, return_exceptions=True)
        await first.ack()


async def test_what_is_not_answered_is_held_back_no_longer_than_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the partitions does not answer in time: whether all have it is not known, as of any append."""
    monkeypatch.setattr(session, "ASK_S", 0.5)
    async with writers(3, tmp_path) as nodes:
        clients = await opened(nodes)
        partition = clients[2].stream.own
        assert partition is not None
        nodes[2].deaf = True
        with pytest.raises(OutcomeUnknown):
            await clients[0].append(24, groups=GROUPS, keys=[f"k{number}" for number in range(24)], timeout_s=0.5)
        assert (await clients[0].take(24)).given.rows.size
        nodes[2].deaf = False
        machine = nodes[2].machine(partition.key)
        await until(lambda: machine.home.books.rows.count and not machine.home.held.state())


async def test_nothing_stays_of_an_append_that_a_close_overtakes(tmp_path: Path) -> None:
    async with writers(3, tmp_path) as nodes:
        clients = await opened(nodes)
        await clients[0].append(24, groups=GROUPS)
        session = clients[0].streams._session
        await session.ask(clients[0].stream.partitions[-1], r.Close(), r.Done)  # the others are still to be told
        with pytest.raises(Closed):
            await clients[1].append(24, groups=GROUPS)
        await until(lambda: rows_in_all(nodes, clients[0]) == 24)
        await nodes[0].directory.close(S)
        await nodes[1].directory.read(S)
        with pytest.raises(Closed):
            await clients[1].append(24, groups=GROUPS)
        assert rows_in_all(nodes, clients[0]) == 24


async def test_new_columns_do_not_wait_for_a_coordinator_that_is_away(tmp_path: Path) -> None:
    class Leaving(ProcessCoordinator):
        away = False

        async def swap(self, key: str, expected: bytes | None, wanted: bytes | None) -> bytes | None:
            if self.away:
                raise Unavailable("it is away")
            return await super().swap(key, expected, wanted)

    coordinator: Any = Leaving()
    async with writers(2, tmp_path, coordinator=coordinator) as nodes:
        clients = await opened(nodes)
        await clients[0].append(1)
        taken = await clients[0].take(1)
        coordinator.away = True
        await clients[0].extend(taken, "y")
        coordinator.away = False
        await taken.ack()


async def test_an_append_that_a_leader_had_let_in_is_let_in_at_once_by_the_next(tmp_path: Path) -> None:
    """Also where `max_lag` holds it, of which a leader knows nothing before it has asked the others: its rows elsewhere
    are held back meanwhile, and consumers may wait for them."""
    async with writers(3, tmp_path) as nodes:
        clients = await opened(nodes, max_lag=1)
        keys = [f"k{number}" for number in range(24)]
        admit = m.Admit(1, clients[0].stream.token, 24, 192, 7, keys[0], b"d", 0.0, GROUPS, [], False, keys)
        admitted = await clients[0].ask(admit)
        own = clients[2].stream.own
        assert own is not None
        await until(lambda: nodes[2].led(own.key))
        await nodes[2].aclose()
        versions, ref = np.full(24, 7, np.int64).tobytes(), clients[0].put(24)
        staged, token = f"{m.STAGED}9", clients[0].stream.token
        append = m.Append(1, token, admitted.ticket, staged, ref.encode(), keys, b"d", GROUPS, versions, {}, {}, [])
        async with asyncio.timeout(PROMPT_S):
            assert (await clients[0].ask(append)).new


async def test_who_makes_an_append_again_while_it_is_under_way_is_told_what_comes_of_it(tmp_path: Path) -> None:
    async with writers(3, tmp_path) as nodes:
        clients = await opened(nodes)
        keys = [f"k{number}" for number in range(24)]
        nodes[2].deaf = True
        first = asyncio.create_task(clients[0].append(24, groups=GROUPS, keys=keys, timeout_s=WAIT_S))
        await until(lambda: rows_in_all(nodes[:2], clients[0]) > 0)
        second = asyncio.create_task(clients[0].append(24, groups=GROUPS, keys=keys, timeout_s=WAIT_S))
        await asyncio.sleep(0)
        assert not second.done()
        nodes[2].deaf = False
        assert (await first).new
        assert not (await second).new
        assert rows_in_all(nodes, clients[0]) == 24
