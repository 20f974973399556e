"""Tables over several nodes: the same calls wherever they are led, whoever dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from dataplane.clock import Deadline
from dataplane.coordinator.base import Unavailable
from dataplane.errors import Corrupt, NotReady, OwnerDied
from dataplane.node.partitions.record import Record
from dataplane.wire import messages as m
from tests.cases import each_case
from tests.unit.node.clustered.tablebench import T, TableBench, hosted_at, leader, table_nodes
from tests.unit.node.partitions.bench import WAIT_S, until


def nothing_kept(node: TableBench) -> bool:
    return node.live == 0 and not node.retained.holders


async def test_rows_are_written_and_read_on_any_node(tmp_path: Path) -> None:
    async with table_nodes(3, tmp_path) as nodes:
        users = [node.client() for node in nodes]
        assert await users[0].write(["a", "b"], "x", tags=[{"n": 1}, {}]) == [0, 1]
        assert await users[1].write(["b", "c"], "x") == [1, 2]
        await users[2].write(["a", "c"], "y")
        for user in users:
            ref = await user.read(["c", "b", "a"], "x")
            assert {node for node, _ in ref.shards()} == {nodes[0].id, nodes[1].id}
            seen = await user.look("x", "y")
            assert (seen.keys, seen.tags) == (["a", "b", "c"], [{"n": 1}, {}, {}])
            assert (await user.look(since=seen.changes)).keys == []
            assert await user.ready("x", "y") == [0, 2]
            listed = await user.tables.answer(m.Tables(1, None), Deadline.after(0))()
            assert isinstance(listed, m.Figures)
            assert list(listed.values) == [T]
        assert sum(bool(node.tables.figures()) for node in nodes) == 1
        await until(lambda: nodes[0].live == 1)  # the cell that was replaced is gone
        await users[1].clear("a", "b", "c")
        await until(lambda: all(map(nothing_kept, nodes)))


async def test_a_record_that_somebody_changed_is_corrupt_and_left_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who knows the table goes on with it."""
    async with table_nodes(2, tmp_path) as (a, b):
        coordinator = a.members._coordinator
        await a.client().write(["a"], "x")
        key, wrong = f"tables/{T}", b"\xc1 wrong"
        before = await coordinator.read(key)
        await coordinator.swap(key, before, wrong)
        with pytest.raises(Corrupt, match="left as it is"):
            await b.tables.directory.read(T)
        await until(lambda: "left as it is. Take the key away" in caplog.text)
        await a.client().write(["c"], "x")
        assert (await a.client().look("x")).keys == ["a", "c"]
        assert await coordinator.read(key) == wrong
        await coordinator.swap(key, wrong, before)
        await b.client().write(["b"], "x")
        assert (await a.client().look("x")).keys == ["a", "c", "b"]


async def test_rows_are_taken_once_whoever_asks(tmp_path: Path) -> None:
    async with table_nodes(3, tmp_path) as nodes:
        users = [node.client() for node in nodes]
        await users[0].write([str(i) for i in range(30)], "x")
        won: list[int] = []

        async def work(number: int) -> None:
            rng = np.random.default_rng(number)
            while True:
                try:
                    ready = await users[number].ready("x", task="train")
                except NotReady:
                    return
                chosen = rng.choice(ready, min(3, len(ready)), replace=False).tolist()
                won.extend(await users[number].take("train", *chosen) or [])

        await asyncio.gather(*(work(number) for number in range(3)))
        assert sorted(won) == list(range(30))
        for user in users:
            assert await user.take("eval", 4, 2, claim="step") == [4, 2]
            assert await user.ready("never", task="eval", claim="step", least=9) == [4, 2]


@each_case("leading", [True, False])
async def test_a_table_survives_the_death_of_any_node(tmp_path: Path, leading: bool) -> None:
    async with table_nodes(3, tmp_path) as nodes:
        users = {node: node.client() for node in nodes}
        for node in nodes:
            await users[node].write([node.name], "x", tags=[{"of": node.name}])
        await users[nodes[0]].take("train", 0, claim="step")
        led = await until(lambda: leader(nodes))
        follower = next(node for node in nodes if node is not led and hosted_at(node) is not None)
        dead = led if leading else follower
        left = [node for node in nodes if node is not dead]
        waiting = asyncio.ensure_future(left[0].client().ready("y", timeout_s=WAIT_S))
        hosted = hosted_at(led)
        await until(lambda: hosted is not None and len(hosted.waiters))
        await dead.aclose()
        for node in left:
            seen = await users[node].look("x")
            assert seen.keys == [node.name for node in nodes]
            assert seen.tags == [{"of": node.name} for node in nodes]
            assert await users[node].take("train", 1, claim="step") == [0]
        await users[left[1]].write(["new"], "y")
        assert await waiting == [3]
        await users[left[0]].write(["new", dead.name], "x")  # and what was lost with the node is mended
        ref = await users[left[1]].read([*(node.name for node in nodes), "new"], "x")
        assert {node for node, _ in ref.shards()} == {node.id for node in left}
        await until(lambda: leader(left))
        await users[left[1]].clear(*(node.name for node in nodes), "new")
        await until(lambda: all(map(nothing_kept, left)))


async def test_rows_whose_node_has_died_are_lost_alone(tmp_path: Path) -> None:
    async with table_nodes(3, tmp_path) as nodes:
        users = [node.client() for node in nodes]
        for number, user in enumerate(users):
            await user.write([f"k{number}"], "x")
        await until(lambda: leader(nodes))
        await nodes[2].aclose()
        ref = await users[0].read(["k2", "k1"], "x")  # who gets them is told `OwnerDied`
        assert {node for node, _ in ref[0].shards()} == {nodes[2].id}
        hosted = hosted_at(await until(lambda: leader(nodes[:2])))
        assert hosted is not None
        await until(lambda: nodes[2].id in hosted.machine.lost_nodes)  # type: ignore[attr-defined]
        await until(lambda: nodes[0].members.away(nodes[2].name))
        with pytest.raises(OwnerDied, match=nodes[2].id.hex()):
            await users[0].write(["k9"], ref=ref[0])


async def test_a_table_that_was_lost_is_said_to_be_and_another_begins(tmp_path: Path) -> None:
    async with table_nodes(4, tmp_path) as nodes:
        users = {node: node.client() for node in nodes}
        for node in nodes:
            await users[node].write([node.name], "x")
        led = await until(lambda: leader(nodes))
        follower = next(node for node in nodes if node is not led and hosted_at(node) is not None)
        left = [node for node in nodes if node not in (led, follower)]
        await asyncio.gather(led.aclose(), follower.aclose())
        for node in left:
            with pytest.raises(OwnerDied, match="was lost with every node that had it"):
                await users[node].look()
        await until(lambda: all(map(nothing_kept, left)))
        fresh = left[0].client()
        assert (await fresh.look()).keys == []
        assert await fresh.write(["a"], "x") == [0]
        for node in left:  # also once there is another of its name
            with pytest.raises(OwnerDied, match="was lost"):
                await users[node].write(["b"])
        assert (await left[1].client().look()).keys == ["a"]


async def test_a_table_that_was_dropped_goes_and_its_numbers_go_on(tmp_path: Path) -> None:
    async with table_nodes(2, tmp_path, idle_s=0.1) as nodes:
        users = [node.client() for node in nodes]
        await users[0].write(["a", "b"], "x")
        changes = (await users[0].look()).changes
        await users[1].ask(m.DropTable)
        await until(lambda: all(map(nothing_kept, nodes)))
        assert (await users[0].look()).keys == []
        await until(lambda: not [*nodes[0].replicas, *nodes[1].replicas])
        assert await users[0].write(["a"], "x") == [2]
        seen = await users[1].look()
        assert (seen.keys, seen.changes == changes) == (["a"], False)


async def test_a_partition_that_is_in_use_stays(tmp_path: Path) -> None:
    async with table_nodes(2, tmp_path, idle_s=0.0) as nodes:
        waiting = asyncio.ensure_future(nodes[0].client().ready("x", timeout_s=WAIT_S))
        other = nodes[1].client()
        for _ in range(20):  # while its partition comes and goes
            await other.write(["a"])
            await other.ask(m.DropTable)
        await other.write(["b"], "x")
        assert len(await waiting) == 1


async def test_many_calls_of_one_client_at_a_time_are_each_done_once(tmp_path: Path) -> None:
    async with table_nodes(2, tmp_path) as nodes:
        user = nodes[0].client()
        await asyncio.gather(*(user.write([f"k{number}"], "x") for number in range(50)))
        assert sorted((await user.look()).keys) == sorted(f"k{number}" for number in range(50))
        user.tables.leave()
        hosted = hosted_at(await until(lambda: leader(nodes)))
        assert hosted is not None
        await until(lambda: not hosted.machine.sessions.producers)  # type: ignore[attr-defined]


async def test_who_asks_while_the_coordinator_has_no_answer_is_answered_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that was wiped is told its records again by their nodes, and says `Unavailable` until then."""
    async with table_nodes(2, tmp_path) as (a, b):
        await a.client().write(["a"], "x")
        directory, refused = b.tables.directory, []
        read = directory.read

        async def forgotten(name: str) -> Record | None:
            if len(refused) < 2:
                refused.append(name)
                raise Unavailable("it has forgotten the table")
            return await read(name)

        monkeypatch.setattr(directory, "find", lambda name: None)
        monkeypatch.setattr(directory, "read", forgotten)
        assert len(await b.client().read(["a"], "x")) == 1
        assert refused == [T, T]
