"""Streams of several nodes: made, widened, drained, dropped, and what becomes of groups meanwhile."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import pytest

from dataplane.clock import Deadline, monotonic
from dataplane.coordinator.current import CurrentCoordinator
from dataplane.coordinator.process import ProcessCoordinator
from dataplane.errors import Corrupt, Lost, Misuse, OutcomeUnknown, PeerUnavailable, Retryable
from dataplane.node.partitions import caretaker
from dataplane.node.partitions.directory import Directory
from dataplane.node.partitions.table import LostPartition, Table
from dataplane.replication.configuration import GENERATION
from tests.cases import each_case
from tests.simulation.machine import TASKS
from tests.unit.node.partitions.bench import WAIT_S, Bench, benches, until
from tests.unit.node.partitions.machine import Asks

S = "rollouts"


async def test_a_stream_has_a_partition_for_each_node_and_one_stream_for_all() -> None:
    coordinator = ProcessCoordinator()
    async with benches(3, coordinator) as nodes:
        made = await asyncio.gather(*(node.directory.open(S, b"settings") for node in nodes))
        assert made[0] == made[1] == made[2]
        assert sorted(each.node for each in made[0].partitions) == ["n0", "n1", "n2"]
        for each in made[0].partitions:
            node = nodes[int(each.node[1:])]
            await until(lambda: node.led(made[0].key(each.number)))  # noqa: B023
        assert await nodes[1].directory.own(S) == (made[0], made[0].own("n1"))
        with pytest.raises(Misuse, match="other settings"):
            await nodes[2].directory.open(S, b"others")
        with pytest.raises(Misuse, match="no stream"):
            await nodes[2].directory.open("another", None)
        # what the losers of the race made is gone
        keys = {nodes[0].replicas.key(made[0].key(each.number)) for each in made[0].partitions}
        await until(
            lambda: {key for key, value in coordinator._registry._values.items() if value and key[:4] == "part"} == keys
        )

        await nodes[2].directory.drop(S)
        await until(lambda: not [hosted for node in nodes for hosted in node.replicas if hosted.configuration.epoch])
        await until(lambda: nodes[0].directory.find(S) is None)
        again = await nodes[0].directory.open(S, b"others")
        assert again.generation != made[0].generation


async def test_values_that_somebody_changed_are_corrupt_and_left_as_they_are() -> None:
    coordinator = ProcessCoordinator()
    async with benches(2, coordinator) as nodes:
        table = await nodes[0].directory.open(S, b"settings")
        partition = table.key(table.partitions[0].number)
        key, wrong = nodes[0].replicas.key(partition), b"\xc1 wrong"
        await until(lambda: any(node.led(partition) for node in nodes))
        for each in (key, f"placements/{S}"):
            await coordinator.swap(each, await coordinator.read(each), wrong)
        for node in nodes:
            with pytest.raises(Corrupt, match="left as it is"):
                await node.directory.read(S)
        leader = next(node for node in nodes if node.at(partition))
        await leader.append(partition, "goes on")
        (other,) = (node for node in nodes if node is not leader)
        leader.replicas.end(leader.replicas.find(partition), forget=True)  # type: ignore[arg-type]
        with pytest.raises(Corrupt, match="Take the key away"):
            await other.router._read(partition)
        assert await coordinator.read(key) == await coordinator.read(f"placements/{S}") == wrong
        await coordinator.swap(f"placements/{S}", wrong, None)
        assert await nodes[0].directory.read(S) == table


async def test_a_node_that_joins_has_a_partition_once_it_appends_and_groups_stay_together() -> None:
    async with benches(2) as nodes:
        table = await nodes[0].directory.open(S, b"s")
        groups = [f"g{i}" for i in range(40)]
        for group, number in zip(groups, table.place(groups).tolist(), strict=True):
            await nodes[0].append(table.key(number), f"first of {group}", key=group)
        late = Bench("n2", nodes[0].members._coordinator)
        try:
            await late.join()
            found, number = await late.directory.own(S)
            assert found.own("n2") == number
            assert found.version == table.version + 2  # its number was reserved first
            assert await late.append(found.key(number), "own") == (0,)
            ((_, positions, older),) = found.moved(groups, found.place(groups))
            assert len(positions)
            # the older partition has them, and refuses others from then on
            moved = groups[int(positions[0])]
            key = found.key(int(older[0]))
            asked = Asks().disowning([moved, "never seen"], found.version)
            assert await late.router.ask(key, asked, Deadline.after(5.0)) == b"\x01\x00"
            with pytest.raises(Retryable, match="moved"):
                await late.append(key, "row", key="never seen")
            await late.append(key, "second", key=moved)
            # once nothing is left there the older version is retired
            for task in TASKS:
                for _ in range(3):
                    partition, leased = await late.lease(found, task, 100)
                    await late.ack(partition, task, leased)
            caretaker = nodes[0].directory
            await until(lambda: nodes[0].directory.find(S).version == found.version)  # type: ignore[union-attr]
            assert (await caretaker.take_care(found)).older == ()
        finally:
            await late.aclose()


async def _care(directory: Directory) -> Table:
    table = await directory.read(S)
    assert table is not None
    return await directory.take_care(table)


async def test_a_node_that_leaves_hands_over_and_its_partition_is_deleted_when_it_is_empty() -> None:
    async with benches(3) as nodes:
        table = await nodes[0].directory.open(S, b"s")
        number = table.own("n2")
        assert number is not None
        key = table.key(number)
        await nodes[2].append(key, "row")
        await until(lambda: nodes[2].led(key))
        await nodes[2].leave(5.0)
        await nodes[2].aclose()
        drained = await _care(nodes[0].directory)
        assert drained.open == tuple(each for each in table.open if each != number)
        assert drained.find(number) is not None  # a row is left
        for task in TASKS:
            partition, leased = await nodes[0].lease(drained, task, 9)
            assert (partition, [row[2] for row in leased.rows]) == (key, ["row"])
            await nodes[0].ack(partition, task, leased)
        assert (await _care(nodes[0].directory)).find(number) is None
        await until(lambda: not any(node.replicas.find(key) for node in nodes[:2]))


async def test_a_coordinator_that_was_wiped_is_told_what_there_is() -> None:
    coordinator = ProcessCoordinator()
    async with benches(2, coordinator) as nodes:
        table = await nodes[0].directory.open(S, b"s")
        key = table.key(table.own("n0") or 0)
        await until(lambda: nodes[0].led(key) and nodes[1].directory.find(S) == table)  # it is watched
        before = dict(coordinator._registry._values)
        for name, value in before.items():
            coordinator._registry.swap(name, value, None)
        assert await nodes[1].append(key, "row") == (0,)
        await until(lambda: coordinator._registry._values.keys() == before.keys())  # a follower may have joined since
        assert await nodes[1].append(key, "another") == (1,)
        assert await nodes[1].directory.open(S, b"s") == table


async def test_a_leader_and_all_that_the_coordinator_knew_may_end_together() -> None:
    """As with two hosts of which the first runs the only server: the second leads all, and has all."""
    coordinator = CurrentCoordinator(wait_s=WAIT_S)
    await coordinator.use(ProcessCoordinator())
    async with benches(2, coordinator) as (first, second):
        table = await first.directory.open(S, b"s")
        first_key, second_key = (table.key(table.own(node.name) or 0) for node in (first, second))
        await until(lambda: first.led(first_key) and second.led(second_key))
        await until(lambda: second.directory.find(S) == table)  # it is watched
        assert await first.append(first_key, "one", "two") == (0, 1)
        assert await first.append(second_key, "three") == (0,)
        await coordinator.use(None, over_s=monotonic())
        await first.aclose()
        await coordinator.use(ProcessCoordinator())
        assert await second.append(first_key, "four") == (2,)
        assert await second.append(second_key, "five") == (1,)
        taken = set[str]()
        while len(taken) < 5:
            partition, leased = await second.lease(table, TASKS[0], 9)
            taken |= {row[2] for row in leased.rows}
            await second.ack(partition, TASKS[0], leased)
        assert taken == {"one", "two", "three", "four", "five"}
        hosted = second.at(first_key)
        assert hosted is not None
        assert hosted.configuration.epoch >= GENERATION


@pytest.mark.long
@each_case("has", [False, True])
async def test_what_only_the_dead_and_a_wiped_coordinator_knew_is_named(
    monkeypatch: pytest.MonkeyPatch, has: bool
) -> None:
    """The second is no follower any more; it does not take itself for one, and says what is lost: sooner where it has
    no replica at all, and nobody else may."""
    monkeypatch.setattr(caretaker, "_FORGOTTEN_S", 0.5 if has else math.inf)
    monkeypatch.setattr(caretaker, "_NOWHERE_S", math.inf if has else 0.5)
    coordinator = CurrentCoordinator(wait_s=WAIT_S)
    await coordinator.use(ProcessCoordinator())
    async with benches(2, coordinator) as (first, second):
        table = await first.directory.open(S, b"s")
        key = table.key(table.own(first.name) or 0)
        await until(lambda: first.led(key))
        await until(lambda: second.directory.find(S) == table)
        first.replicas.recruiting.wanted = lambda partition: 0
        replica = second.replicas.find(key)
        assert replica is not None
        second.replicas.end(replica)
        await until(lambda: first.led(key, followers=0))
        if has:
            second.replicas.host(key)
        await coordinator.use(None, over_s=monotonic())
        await first.aclose()
        await coordinator.use(ProcessCoordinator())
        await until(lambda: second.members.gone(first.name))
        with pytest.raises((PeerUnavailable, OutcomeUnknown)):
            await second.append(key, "one", timeout_s=0.5)

        def lost() -> Sequence[LostPartition]:
            found = second.directory.find(S)
            return () if found is None else found.lost

        await until(lost)  # it takes care of the table itself
        assert [each.node for each in lost()] == [first.name]
        with pytest.raises(Lost):
            await second.append(key, "one")


@pytest.mark.long
async def test_a_follower_that_can_not_be_sure_any_more_is_waited_for_no_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(caretaker, "_FORGOTTEN_S", math.inf)
    monkeypatch.setattr(caretaker, "_NOWHERE_S", 0.5)
    coordinator = CurrentCoordinator(wait_s=WAIT_S)
    await coordinator.use(ProcessCoordinator())
    async with benches(2, coordinator) as (first, second):
        table = await first.directory.open(S, b"s")
        key = table.key(table.own(first.name) or 0)
        await until(lambda: first.led(key))
        await until(lambda: second.directory.find(S) == table)
        await coordinator.use(None, over_s=monotonic() + 100)
        await first.aclose()
        await coordinator.use(ProcessCoordinator())
        await until(lambda: (found := second.directory.find(S)) is not None and found.lost)
        with pytest.raises(Lost):
            await second.append(key, "one")


async def test_a_partition_whose_replicas_have_all_died_is_named_and_others_go_on() -> None:
    async with benches(3, lost_s=1.5) as nodes:
        table = await nodes[0].directory.open(S, b"s", followers=1)
        key = table.key(table.own("n2") or 0)
        await until(lambda: nodes[2].led(key))
        follower = nodes[2].at(key).configuration.followers[0][0]  # type: ignore[union-attr]
        other = nodes[1] if follower == "n0" else nodes[0]
        both = [nodes[2], nodes[int(follower[1:])]]
        for node in both:
            node.replicas.recruiting.wanted = lambda partition: 0
        other.replicas.recruiting.wanted = lambda partition: 0
        await asyncio.gather(*(node.aclose() for node in both))
        await until(lambda: all(other.members.gone(node.name) for node in both))
        found = await _care(other.directory)
        assert [each.node for each in found.lost] in (["n2"], ["n2", follower], [follower, "n2"])
        assert found.open
        assert found.own(other.name) is not None
