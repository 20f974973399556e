"""What is left of clients, and of nodes that were away."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from dataplane.batch.field import Field
from dataplane.batch.ref import BatchRef
from dataplane.errors import Backpressure, LimitExceeded, Misuse, OutcomeUnknown, PeerUnavailable, SchemaMismatch
from dataplane.node.clustered import session as sessions
from dataplane.wire import messages as m
from dataplane.wire import peer_messages as pm
from dataplane.wire.partition_messages import Ask, Withdrawn
from tests.unit.node.clustered.readers import readers
from tests.unit.node.clustered.writers import S, WriterBench, writers
from tests.unit.node.partitions.bench import SETTINGS, until
from tests.unit.node.partitions.test_returning import absent, back


async def a_group_of(node: WriterBench, asker: WriterBench) -> str:
    """A group that the table has at the node's partition."""
    table = await asker.directory.read(S)
    assert table is not None
    groups = [f"group-{number}" for number in range(256)]
    for placed in await asker.directory.place(table, groups):
        partition = table.find(placed.number)
        if partition is not None and partition.node == node.name:
            return groups[int(placed.positions[-1])]
    raise AssertionError("256 groups, and none is there")


async def test_a_node_that_was_away_for_long_appends_again(tmp_path: Path) -> None:
    """It comes back as the same, with all that it holds; what was lost stays so, and what it puts now is new."""
    async with writers(3, tmp_path, lost_s=0.5) as [leader, other, third]:
        await leader.connect().open()
        writer = other.connect()
        await writer.open()
        for node in (leader, other, third):
            await node.directory.own(S)
        await until(lambda: all(len(node.directory.find(S).open) == 3 for node in (leader, other, third)))  # type: ignore[union-attr]
        await writer.append(1, groups=[await a_group_of(leader, other)])
        table = leader.directory.find(S)
        assert table is not None
        key = leader.own_key(table)
        await absent(other, [leader, third])
        await until(lambda: leader.machine(key).lost_nodes)
        await back(other, [leader, third])
        await other.directory.own(S)  # its own partition may have been closed
        appended = await writer.append(1, groups=[await a_group_of(leader, other)])
        assert appended.new


async def test_a_consumer_that_has_its_rows_waits_nowhere() -> None:
    async with readers(2) as [node, other]:
        client = node.reader()
        for _ in range(3):
            taking = asyncio.ensure_future(client.take(64, timeout_s=60.0, min_rows=64))
            await asyncio.sleep(0.02)
            for number in range(64):
                await other.put([number])
            await client.settle(await taking)
        hosted = node.replicas.find(node.own.key)
        assert hosted is not None
        assert len(hosted.waiters) == 0


async def test_a_client_remembers_nothing_of_streams_that_were_dropped(tmp_path: Path) -> None:
    async with writers(1, tmp_path) as [node]:
        client = node.connect()
        for _ in range(3):
            await client.open()
            await client.append(1)
            await node.directory.drop(S)
        session: Any = client.streams._session
        assert len(session._asked) <= 1
        assert not node.retained._told
        assert not node.columns._told


async def test_room_that_a_refused_append_was_let_in_to_is_there_again(tmp_path: Path) -> None:
    async with writers(1, tmp_path, settings=replace(SETTINGS, max_command=8192)) as [node]:
        client = node.connect()
        await client.open(max_rows=100)
        with pytest.raises(LimitExceeded, match="a command of"):
            await client.append(60, keys=[f"{number:01000d}" for number in range(60)])
        appended = await client.append(60, timeout_s=2.0)
        assert appended.new


@pytest.mark.long
async def test_room_of_a_client_that_went_while_its_node_was_cut_off_is_there_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "ASK_S", 1.0)
    async with writers(3, tmp_path) as nodes:
        for node in nodes:
            client = node.connect()
            await client.open(max_rows=12)
            await node.directory.own(S)
        await until(lambda: all(len(node.directory.find(S).open) == 3 for node in nodes))  # type: ignore[union-attr]
        table = nodes[0].directory.find(S)
        assert table is not None
        leader = nodes[0]
        key = leader.own_key(table)
        await until(lambda: leader.led(key))
        hosted = leader.replicas.find(key)
        assert hosted is not None
        (follower,) = hosted.configuration.followers
        other = next(node for node in nodes[1:] if node.name != follower[0])
        client = other.connect()
        await client.open(max_rows=12)
        group = await a_group_of(leader, other)
        await client.append(1, groups=[group])
        admit = await client.streams._producers.admit(
            _admit(client, 2, group), client.stream, sessions.Deadline.after(5.0)
        )
        assert admit
        assert leader.machine(key).home.admission.used[0] == 3
        receive = leader.receive
        leader.receive = lambda frame: None if frame.node == other.name else receive(frame)  # type: ignore[method-assign]
        client.streams.leave()
        await asyncio.sleep(3.0)
        leader.receive = receive  # type: ignore[method-assign]
        assert leader.led(key)
        await asyncio.sleep(3.0)
        assert leader.machine(key).home.admission.used[0] == 1


def _admit(client: Any, rows: int, group: str) -> Any:
    return m.Admit(1, client.stream.token, rows, 8 * rows, 0, "", b"", 0.0, [group] * rows, [], False, [])


@pytest.mark.long
async def test_columns_are_let_go_though_the_first_word_of_that_is_lost(tmp_path: Path) -> None:
    async with writers(3, tmp_path) as [node, _, third]:
        client = node.connect()
        await client.open()
        await client.append(1, keys=["a"])
        before = third.kept
        kept = third.connect().put(1)
        real = third.service.answer
        lost = [1]

        def once(request: Any) -> Any:
            if isinstance(request, pm.ReleaseColumns) and lost:
                lost.clear()
                raise RuntimeError("lost on the way")
            return real(request)

        third.service.answer = once  # type: ignore[method-assign]
        with pytest.raises(Misuse):
            await client.ask(_other_append(client, await _ticket(client), kept))
        await asyncio.sleep(4.0)
        (key,) = kept.shards()
        third.homes.recovered({key[1]: key})  # which frees what nobody needs
        await asyncio.sleep(0.1)
        assert (third.kept, len(third.service.holders._claimed)) == (before, 0)


async def _ticket(client: Any) -> int:
    admit = m.Admit(1, client.stream.token, 1, 8, 0, "b", b"other", 0.0, [], [], False, ["a"])
    return int((await client.ask(admit)).ticket)


def _other_append(client: Any, ticket: int, ref: Any) -> Any:
    return m.Append(
        1,
        client.stream.token,
        ticket,
        "",
        ref.encode(),
        ["a"],
        b"other",
        [],
        np.zeros(1, np.int64).tobytes(),
        {},
        {},
        [],
    )


async def test_an_append_to_a_partition_that_is_lost_goes_to_another(tmp_path: Path) -> None:
    async with writers(3, tmp_path) as nodes:
        for node in nodes:
            await node.connect().open()
            await node.directory.own(S)
        await until(lambda: all(len(node.directory.find(S).open) == 3 for node in nodes))  # type: ignore[union-attr]
        table = nodes[0].directory.find(S)
        assert table is not None
        for leader in nodes:
            key = leader.own_key(table)
            await until(lambda: leader.led(key))  # noqa: B023
            hosted = leader.replicas.find(key)
            assert hosted is not None
            (follower,) = hosted.configuration.followers
            (left,) = [node for node in nodes if node.name not in (leader.name, follower[0])]
            client = left.connect()
            await client.open()
            group = await a_group_of(leader, left)
            for node in nodes:
                if node is not left:
                    await node.aclose()
            appended = await client.append(1, groups=[group], timeout_s=15.0)
            assert appended.new
            return


async def test_rows_that_make_no_delivery_together_are_held_by_nobody() -> None:
    async with readers(2) as [node, other]:
        await node.put([1])
        column = Field("dense", "float32", (3,))
        await other.put([2], ref=BatchRef.of(bytes.fromhex(other.name), 1, [("x", column, 12, 77, 0)]))
        with pytest.raises(SchemaMismatch):
            await node.reader().take(2, timeout_s=3.0, min_rows=2)
        await asyncio.sleep(0.2)
        assert [len(each.machine(each.own.key).home.leases) for each in (node, other)] == [0, 0]


@pytest.mark.long
async def test_room_that_a_leader_gives_too_late_is_there_again(tmp_path: Path) -> None:
    async with writers(2, tmp_path) as [node, slow]:
        client = node.connect()
        await client.open(max_rows=12)
        await slow.directory.own(S)
        await until(lambda: all(len(each.directory.find(S).open) == 2 for each in (node, slow)))  # type: ignore[union-attr]
        group = await a_group_of(slow, node)
        await client.append(1, groups=[group])
        await until(lambda: not node.directory.find(S).older)  # type: ignore[union-attr]
        table = node.directory.find(S)
        assert table is not None
        machine = slow.machine(slow.own_key(table))
        hear, loop = slow.channel.heard, asyncio.get_running_loop()

        def later(sender: str, item: Any) -> None:
            if isinstance(item, Ask | Withdrawn):
                loop.call_later(2.5, hear, sender, item)
            else:
                hear(sender, item)

        slow.channel.heard = later
        with pytest.raises((Backpressure, OutcomeUnknown, PeerUnavailable)):
            await client.append(2, groups=[group] * 2, timeout_s=0.2)
        slow.channel.heard = hear
        await asyncio.sleep(5.0)  # until all that is under way has come
        assert machine.home.admission.used[0] == 1
