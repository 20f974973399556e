"""Placement tables where nodes join, leave and drop streams at the same time, and where answers are lost or late."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from dataplane.cluster.membership import Member, Membership
from dataplane.coordinator.process import ProcessCoordinator
from dataplane.errors import OutcomeUnknown, PeerUnavailable
from dataplane.node.partitions.directory import Directory
from dataplane.node.partitions.requests import YES
from dataplane.node.partitions.streams import StreamRequests, encode_settings
from dataplane.node.partitions.table import LostPartition, Partition
from dataplane.replication.configuration import Configuration, encode
from dataplane.stream.settings import Settings
from tests.unit.node.partitions.bench import benches, until
from tests.unit.node.partitions.streambench import TASKS, S, StreamBench

SETTINGS = encode_settings(Settings(TASKS))


class _Recruiting:
    wanted = staticmethod(lambda partition: 1)


class _Replicas:
    """Partitions that are made and deleted somewhere."""

    def __init__(self) -> None:
        self.recruiting = _Recruiting()
        self.hosting: Any = lambda partition: None
        self.census: Any = lambda census: None
        self.remembered = None
        self.made = 0

    def key(self, partition: str) -> str:
        return f"partitions/{partition}"

    async def create(self, partition: str, node: str, followers: int) -> None:
        self.made += 1
        await asyncio.sleep(0.002)

    async def delete(self, partition: str) -> None:
        await asyncio.sleep(0.002)

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _Router:
    """Partitions that answer, but for those of `silent` nodes."""

    def __init__(self) -> None:
        self.silent: set[str] = set()
        self.named: Any = lambda partition: False

    async def ask(self, partition: str, request: bytes, deadline: object, **options: Any) -> bytes:
        await asyncio.sleep(0.001)
        if any(partition.endswith(f"-{node}") for node in self.silent):
            raise PeerUnavailable("it does not answer")
        return YES

    def forget(self, partition: str) -> None:
        return


class _Distant(ProcessCoordinator):
    """Each call takes some milliseconds."""

    swaps = 0

    async def read(self, key: str) -> bytes | None:
        await asyncio.sleep(0.002)
        return await super().read(key)

    async def swap(self, key: str, expected: bytes | None, value: bytes | None) -> bytes | None:
        self.swaps += 1
        await asyncio.sleep(0.002)
        return await super().swap(key, expected, value)


async def _has_its_own(directory: Directory) -> None:
    while (await directory.own(S))[0].own(directory._me) is None:
        await asyncio.sleep(0.05)


@pytest.mark.long
async def test_forty_nodes_that_append_at_once_each_have_a_partition_soon() -> None:
    coordinator, count = _Distant(), 40
    names = [f"{number:016x}" for number in range(1, count + 1)]
    members = [Membership(coordinator, name, Member(i, f"tcp://127.0.0.1:{1000 + i}")) for i, name in enumerate(names)]
    running = [asyncio.ensure_future(each.run()) for each in members]
    for each in members:
        await each.joined()
    replicas = [_Replicas() for _ in names]
    directories = [
        Directory(coordinator, member, made, _Router(), StreamRequests())  # type: ignore[arg-type]
        for member, made in zip(members, replicas, strict=True)
    ]
    try:
        await until(lambda: len(members[0].current) == count)
        await directories[0].open(S, SETTINGS)
        running += [asyncio.ensure_future(each.run()) for each in directories]
        for each in directories[1:]:
            await each.open(S, None)
        coordinator.swaps = 0
        found = await asyncio.gather(*(each.own(S) for each in directories), return_exceptions=True)
        errors = [error for error in found if isinstance(error, BaseException)]
        async with asyncio.timeout(20.0):
            await asyncio.gather(*map(_has_its_own, directories))
        made = sum(each.made for each in replicas)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for each in directories:
            await each.aclose()
        await coordinator.aclose()
    assert not errors, f"{len(errors)} of {count}: {errors[0]}"
    assert made <= 3 * count, "partitions that nobody needs"


async def test_who_drops_a_stream_does_not_drop_the_next_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    async with benches(2, make=StreamBench) as [node, other]:
        await node.opened()
        made, delete = asyncio.Event(), node.directory._delete

        async def slowly(table: Any) -> None:
            await made.wait()
            await delete(table)

        monkeypatch.setattr(node.directory, "_delete", slowly)
        dropping = asyncio.ensure_future(node.directory.drop(S))
        await until(lambda: node.directory.find(S) is None)
        table = await other.directory.open(S, SETTINGS)
        made.set()
        await dropping
        now = await other.directory.read(S)
        assert now is not None
        assert now.generation == table.generation


async def test_a_late_read_of_a_dropped_stream_does_not_hide_the_next_of_its_name() -> None:
    class Late(ProcessCoordinator):
        reader: asyncio.Task[Any] | None = None
        held, told = asyncio.Event(), asyncio.Event()

        async def read(self, key: str) -> bytes | None:
            value = await super().read(key)
            if asyncio.current_task() is self.reader:
                self.held.set()
                await self.told.wait()
            return value

    coordinator = Late()
    async with benches(2, coordinator, make=StreamBench) as [node, other]:
        await node.opened()
        await other.directory.read(S)
        coordinator.reader = asyncio.ensure_future(other.directory.read(S))
        await coordinator.held.wait()
        await node.directory.drop(S)
        await until(lambda: other.directory.find(S) is None)
        table = await node.directory.open(S, SETTINGS)
        other.directory.records.watch(S)
        await until(lambda: other.directory.find(S))
        coordinator.told.set()
        await coordinator.reader
        found = await until(lambda: other.directory.find(S))
        assert found.generation == table.generation


async def test_a_lost_partition_is_told_though_the_first_answer_was_lost() -> None:
    class Lossy(ProcessCoordinator):
        lose = False

        async def swap(self, key: str, expected: bytes | None, value: bytes | None) -> bytes | None:
            found = await super().swap(key, expected, value)
            if self.lose:
                self.lose = False
                raise OutcomeUnknown("its answer is lost")
            return found

    coordinator = Lossy()
    async with benches(1, coordinator, make=StreamBench) as [node]:
        table, lost = await node.opened(), LostPartition(7, "x", 3)
        await node.directory.records.swap(
            table, msgspec.structs.replace(table, version=table.version + 1, lost=(lost,))
        )
        coordinator.lose = True
        with pytest.raises(OutcomeUnknown):
            await node.directory.take_lost(S)
        assert await node.directory.take_lost(S) == (lost,)


async def test_of_two_nodes_that_ask_at_once_one_tells_of_a_loss() -> None:
    """Both changes are equal but for who made them."""
    async with benches(2, make=StreamBench) as [node, other]:
        table, lost = await node.opened(), LostPartition(7, "x", 3)
        wanted = msgspec.structs.replace(table, version=table.version + 1, lost=(lost,))
        await node.directory.records.swap(table, wanted)
        await other.directory.read(S)
        told = await asyncio.gather(node.directory.take_lost(S), other.directory.take_lost(S))
        assert sorted(told) == [(), (lost,)]


async def test_a_node_leaves_with_a_handover_though_many_joined_just_before() -> None:
    async with benches(2, make=StreamBench) as [node, other]:
        await node.opened()
        table, _ = await other.directory.own(S)
        for number in range(16 - len(table.older)):
            found = await node.directory.records.swap(table, table.extended([f"{number + 1:016x}"]))
            assert found is not None
            table = found
        await other.directory.read(S)
        key = other.own_key(table)
        await until(lambda: other.led(key))
        await other.directory.leave(6.0)
        assert other.at(key) is None


async def test_a_lost_partition_is_told_though_another_does_not_answer() -> None:
    coordinator, me = ProcessCoordinator(), f"{1:016x}"
    members = Membership(coordinator, me, Member(1, "tcp://127.0.0.1:1001"), lost_s=0.0)
    running = asyncio.ensure_future(members.run())
    await members.joined()
    replicas, router, silent, dead = _Replicas(), _Router(), f"{2:016x}", f"{3:016x}"
    directory = Directory(coordinator, members, replicas, router, StreamRequests())  # type: ignore[arg-type]
    try:
        table = await directory.open(S, SETTINGS)
        added = (Partition(1, silent, open=False), Partition(2, dead))
        table = msgspec.structs.replace(
            table, version=table.version + 1, partitions=(*table.partitions, *added), next=3
        )
        await directory.records.swap(directory.find(S), table)
        router.silent.add(silent)
        for number, node in ((0, me), (1, me), (2, dead)):
            await coordinator.swap(replicas.key(table.key(number)), None, encode(Configuration(1, (node, 1))))
        with suppress(PeerUnavailable):
            await directory.take_care(table)
        assert [each.number for each in await directory.take_lost(S)] == [2]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await directory.aclose()
        await coordinator.aclose()


@pytest.mark.long
async def test_a_stream_that_nobody_names_goes_with_who_prepared_it() -> None:
    async with benches(2, make=StreamBench, lost_s=0.5) as [node, ends]:
        table = await ends.directory.prepare(S, SETTINGS)
        key = table.key(0)
        await until(lambda: ends.led(key))
        await ends.aclose()
        await until(lambda: node.at(key))
        await until(lambda: node.replicas.find(key) is None, 10.0)


async def test_a_node_that_has_no_follower_leaves_at_once() -> None:
    async with benches(1, make=StreamBench) as [node]:
        await node.opened()
        async with asyncio.timeout(1.0):
            await node.directory.leave(6.0)
