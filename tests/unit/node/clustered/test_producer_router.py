"""Appends over partitions: where rows go, what is let in, and what becomes of columns."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dataplane.clock import Deadline
from dataplane.errors import Backpressure, Closed, LeaseExpired, Misuse, OutcomeUnknown
from dataplane.node.clustered import session
from dataplane.wire import messages as m
from tests.unit.node.clustered.writers import Writer, WriterBench, writers
from tests.unit.node.partitions.bench import WAIT_S, until

GROUPS = [f"prompt-{i}" for i in range(24)]


async def opened(nodes: list[WriterBench], **settings: int) -> list[Writer]:
    """A client on each node, with a partition of each, which are led there."""
    clients = [node.connect() for node in nodes]
    for client in clients:
        await client.open(**settings)
    for node, client in zip(nodes, clients, strict=True):
        await node.directory.own(client.stream.name)
        own = client.stream.own
        assert own is not None
        await until(lambda: node.at(own.key))  # noqa: B023
    return clients


def rows_of(node: WriterBench, client: Writer) -> int:
    """The rows in the partition of this node's producers."""
    own = client.stream.own
    assert own is not None
    return node.machine(own.key).home.books.rows.count


async def test_rows_without_a_group_stay_on_their_producers_node(tmp_path: Path) -> None:
    async with writers(3, tmp_path) as nodes:
        clients = await opened(nodes)
        for client in clients:
            reply = await client.append(4)
            assert (reply.new, reply.first) == (True, 0)
            assert client.stream.own is not None
            assert reply.mark == client.stream.own.mark
        assert [rows_of(node, client) for node, client in zip(nodes, clients, strict=True)] == [4, 4, 4]


async def test_columns_are_freed_where_they_are_stored_once_all_is_acked(tmp_path: Path) -> None:
    async with writers(3, tmp_path) as nodes:
        clients = await opened(nodes)
        await clients[0].append(24, groups=GROUPS)
        left = 24
        while left:
            taken = await clients[1].take(24)
            left -= len(taken.given.rows)
            assert nodes[0].kept == 1
            await taken.ack()
        await until(lambda: nodes[0].kept == 0)
        assert not nodes[0].retained.holders


async def test_a_group_has_one_partition_wherever_its_rows_come_from(tmp_path: Path) -> None:
    async with writers(3, tmp_path) as nodes:
        clients = await opened(nodes)
        for client in clients:
            reply = await client.append(24, groups=GROUPS)
            assert len(set(reply.keys)) == 24
        for node, client in zip(nodes, clients, strict=True):
            own = client.stream.own
            assert own is not None
            books = node.machine(own.key).home.books
            assert all(books.groups.number(name) is None or len(books.in_groups([name])) == 3 for name in GROUPS)
            assert 0 < books.rows.count < 72


async def test_groups_of_the_streams_size_are_whole_and_others_are_not(tmp_path: Path) -> None:
    async with writers(3, tmp_path) as nodes:
        clients = await opened(nodes, group_size=2)
        whole = [name for name in GROUPS for _ in range(2)]
        await clients[0].append(48, groups=whole)
        assert rows_of(nodes[0], clients[0]) == 48
        halves = [f"half-{i}" for i in range(24)]
        for client in clients[:2]:
            await client.append(24, groups=halves)
        kept = [rows_of(node, client) for node, client in zip(nodes, clients, strict=True)]
        assert sum(kept) == 96
        assert all(kept)
        for node, client in zip(nodes, clients, strict=True):
            assert client.stream.own is not None
            books = node.machine(client.stream.own.key).home.books
            assert all(books.groups.number(name) is None or len(books.in_groups([name])) == 2 for name in halves)


async def test_a_keyed_append_made_again_is_the_same_one(tmp_path: Path) -> None:
    async with writers(3, tmp_path) as nodes:
        clients = await opened(nodes)
        keys = [f"row-{i}" for i in range(24)]
        assert (await clients[0].append(24, keys=keys)).new
        for client in clients[:2]:
            assert not (await client.append(24, keys=keys)).new
        await until(lambda: nodes[1].kept == 0)
        with pytest.raises(Misuse, match="already"):
            await clients[2].append(24, keys=[*reversed(keys)])
        assert nodes[2].kept == 0
        assert sum(rows_of(node, client) for node, client in zip(nodes, clients, strict=True)) == 24


async def test_an_append_waits_for_room_and_is_let_in_at_all_partitions_or_none(tmp_path: Path) -> None:
    async with writers(3, tmp_path) as nodes:
        clients = await opened(nodes, max_rows=30)
        await clients[0].append(24, groups=GROUPS)
        with pytest.raises(Backpressure):
            await clients[1].append(24, groups=GROUPS, timeout_s=0.3)
        waiting = asyncio.create_task(clients[2].append(24, groups=GROUPS))
        while not waiting.done():
            try:
                taken = await clients[1].take(24, timeout_s=0.5)
            except AssertionError:
                continue
            await taken.ack()
        assert (await waiting).new
        assert sum(rows_of(node, client) for node, client in zip(nodes, clients, strict=True)) <= 30


async def test_what_was_admitted_and_does_not_come_makes_room_again(tmp_path: Path) -> None:
    async with writers(1, tmp_path) as nodes:
        (client,) = await opened(nodes, max_rows=10)
        other = nodes[0].connect()
        other.stream = client.stream
        admitted = await client.ask(m.Admit(1, client.stream.token, 8, 64, 0, "", b"", 0.0))
        with pytest.raises(Backpressure):
            await other.append(8, timeout_s=0.2)
        assert client.streams.expected
        client.streams.answer(m.GiveBack(client.stream.token, admitted.ticket), Deadline.after(0.0))
        assert not client.streams.expected
        assert (await other.append(2)).new
        with pytest.raises(LeaseExpired):
            await client.ask(
                m.Append(
                    1, client.stream.token, admitted.ticket, "", client.put(8).encode(), [], b"", [], bytes(64), {}, {}
                )
            )


async def test_rows_outlive_the_leader_and_go_on_where_it_was(tmp_path: Path) -> None:
    async with writers(3, tmp_path) as nodes:
        clients = await opened(nodes)
        own = clients[2].stream.own
        assert own is not None
        await clients[0].append(24, groups=GROUPS)
        await until(lambda: nodes[2].led(own.key))
        await nodes[2].aclose()
        again = await clients[1].append(24, groups=GROUPS)
        assert again.new
        seen = 0
        while seen < 48:
            taken = await clients[0].take(48)
            seen += len(taken.given.rows)
            await taken.ack()
        await until(lambda: nodes[0].kept + nodes[1].kept == 0)


async def test_an_append_whose_answer_is_lost_is_settled_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ASK_S", 0.5)
    async with writers(2, tmp_path) as nodes:
        clients = await opened(nodes)
        own = clients[1].stream.own
        assert own is not None
        table = clients[0].stream.table
        there = [name for name in GROUPS if table.place([name])[0] == own.number]
        nodes[0].deaf = True
        with pytest.raises(OutcomeUnknown):
            await clients[0].append(len(there), groups=there, timeout_s=0.5)
        assert nodes[0].retained.holders == [own.key]
        assert nodes[0].kept == 1
        nodes[0].deaf = False
        await clients[0].streams._session._asked[own.key].settled()
        assert rows_of(nodes[1], clients[1]) == len(there)
        assert nodes[0].kept == 1
        await (await clients[1].take(len(there))).ack()
        await until(lambda: nodes[0].kept == 0)


async def test_an_append_is_asked_for_until_its_own_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "ASK_S", 0.2)
    async with writers(2, tmp_path) as nodes:
        clients = await opened(nodes)
        own = clients[1].stream.own
        assert own is not None
        table = clients[0].stream.table
        there = [name for name in GROUPS if table.place([name])[0] == own.number]
        nodes[0].deaf = True
        appending = asyncio.create_task(clients[0].append(len(there), groups=there, timeout_s=WAIT_S))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(4 * session.ASK_S):
                await asyncio.shield(appending)
        nodes[0].deaf = False
        assert (await appending).new


async def test_a_dropped_stream_is_closed_and_freed_everywhere(tmp_path: Path) -> None:
    async with writers(3, tmp_path) as nodes:
        clients = await opened(nodes)
        for client in clients:
            await client.append(24, groups=GROUPS)
        await nodes[0].service.drop(clients[0].stream)
        assert [node.kept for node in nodes] == [0, 0, 0]
        for client in clients:
            with pytest.raises(Closed):
                await client.append(1)
        again = await opened(nodes)
        assert again[0].stream.token != clients[0].stream.token
        assert (await again[2].append(3)).first == 0


async def test_a_client_that_goes_gives_back_what_it_holds(tmp_path: Path) -> None:
    async with writers(2, tmp_path) as nodes:
        clients = await opened(nodes)
        await clients[0].append(8)
        await clients[1].take(8)
        clients[1].streams.leave()
        assert len((await clients[0].take(8, WAIT_S)).given.rows) == 8


async def test_columns_that_a_third_node_keeps_for_what_did_not_come_are_let_go(tmp_path: Path) -> None:
    async with writers(3, tmp_path) as nodes:
        clients = await opened(nodes)
        keys = ["a", "b"]
        assert (await clients[1].append(2, keys=keys)).new
        with pytest.raises(Misuse):
            await clients[1].append(2, keys=["b", "a"], ref=clients[0].put(2))
        await until(lambda: not nodes[0].retained.holders)
        assert nodes[0].kept == 1
