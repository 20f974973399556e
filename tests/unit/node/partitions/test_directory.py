"""Streams of several nodes: made, opened, dropped, and what is done where all replicas have died."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import NoReturn

import msgspec
import pytest

from dataplane.background_tasks import BackgroundTasks
from dataplane.coordinator.base import Coordinator
from dataplane.errors import Backpressure, Corrupt, Lost, Misuse, OutcomeUnknown, PeerUnavailable
from dataplane.node.partitions import directory
from dataplane.node.partitions.record import EPOCHS, LostPartition, Record, encode
from dataplane.node.partitions.records import Records
from tests.cases import each_case
from tests.coordinator import ProcessCoordinator
from tests.simulation.machine import TASKS
from tests.unit.node.partitions.bench import Bench, absent, back, benches, until

S = "rollouts"


def leader(nodes: Sequence[Bench], record: Record, followers: int = 1) -> Bench | None:
    return next((node for node in nodes if node.led(record.key or "", followers)), None)


async def led(nodes: Sequence[Bench], record: Record, followers: int = 1) -> Bench:
    found: Bench = await until(lambda: leader(nodes, record, followers))
    return found


async def forget(coordinator: ProcessCoordinator) -> set[str]:
    """Wipe a coordinator; the keys that it had."""
    before = dict(coordinator._values)
    for name in before:
        coordinator._set(name, None)
    return set(before)


async def test_concurrent_opens_of_one_name_create_one_stream_with_one_partition() -> None:
    coordinator = ProcessCoordinator()
    async with benches(3, coordinator) as nodes:
        made = await asyncio.gather(*(node.directory.open(S, b"settings") for node in nodes))
        assert made[0] == made[1] == made[2]
        await led(nodes, made[0])
        assert await nodes[2].directory.open(S, b"others") == made[0]  # its user compares the settings
        with pytest.raises(Misuse, match="no stream"):
            await nodes[2].directory.open("another", None)
        # what the losers of the race made is gone
        key = nodes[0].replicas.key(made[0].key or "")
        values = coordinator._values
        await until(lambda: {name for name, value in values.items() if value and name.startswith("part")} == {key})

        await nodes[2].directory.drop(S)
        await until(lambda: not [hosted for node in nodes for hosted in node.replicas if hosted.configuration.epoch])
        await until(lambda: nodes[0].directory.records.find(S) is None)
        again = await nodes[0].directory.open(S, b"others")
        assert again.generation != made[0].generation


async def test_altered_coordinator_values_are_corrupt_and_not_overwritten() -> None:
    coordinator = ProcessCoordinator()
    async with benches(2, coordinator) as nodes:
        record = await nodes[0].directory.open(S, b"settings")
        partition = record.key or ""
        key, wrong = nodes[0].replicas.key(partition), b"\xc1 wrong"
        first = await led(nodes, record)
        for each in (key, f"streams/{S}"):
            await coordinator.swap(each, await coordinator.read(each), wrong)
        for node in nodes:
            with pytest.raises(Corrupt, match="left as it is"):
                await node.directory.records.read(S)
        await first.append(partition, "goes on")
        (other,) = (node for node in nodes if node is not first)
        first.replicas.end(first.replicas.find(partition), forget=True)  # type: ignore[arg-type]
        with pytest.raises(Corrupt, match="Delete the key"):
            await other.router._read(partition)
        assert await coordinator.read(key) == await coordinator.read(f"streams/{S}") == wrong
        await coordinator.swap(f"streams/{S}", wrong, None)
        assert await nodes[0].directory.records.read(S) == record


async def test_nodes_write_their_records_back_to_a_wiped_coordinator() -> None:
    coordinator = ProcessCoordinator()
    async with benches(2, coordinator) as nodes:
        record = await nodes[0].directory.open(S, b"s")
        key = record.key or ""
        await led(nodes, record)
        await nodes[1].directory.open(S, None)  # it is watched
        assert await nodes[1].append(key, "row") == (0,)
        before = await forget(coordinator)
        assert await nodes[1].append(key, "another") == (1,)
        await until(lambda: coordinator._values.keys() == before)  # a follower may have joined since
        assert await nodes[1].directory.open(S, b"s") == record


@each_case("wiped", [False, True])
async def test_a_record_missing_after_a_cut_is_restored_only_to_a_wiped_coordinator(wiped: bool) -> None:
    coordinator, background = ProcessCoordinator(), BackgroundTasks()
    one, cut = [Records(coordinator, background, lambda key: None, "streams/") for _ in range(2)]
    record = await one.swap(None, Record(1, S, "generation", b"s", 0))
    assert record is not None
    assert await cut.read(S) == record
    await until(lambda: S in cut._eras)
    await background.aclose()
    if wiped:
        await forget(coordinator)
    else:
        assert await one.delete(record)
    assert await cut.read(S) == cut.find(S) == (record if wiped else None)
    assert await coordinator.read("streams/" + S) == (encode(record) if wiped else None)


def lost(node: Bench) -> Sequence[LostPartition]:
    found = node.directory.records.find(S)
    return () if found is None else found.lost


@pytest.mark.long
@each_case("has", [False, True])
async def test_a_partition_lost_with_its_leader_and_a_wiped_coordinator_is_reported(
    monkeypatch: pytest.MonkeyPatch, has: bool
) -> None:
    """The second is no follower any more; it does not take itself for one, and says what is lost: sooner where it has
    no replica at all, and nobody else may."""
    monkeypatch.setattr(directory, "_FORGOTTEN_S", 0.5 if has else math.inf)
    monkeypatch.setattr(directory, "_NOWHERE_S", math.inf if has else 0.5)
    coordinator = ProcessCoordinator()
    async with benches(2, coordinator) as nodes:
        record = await nodes[0].directory.open(S, b"s")
        key = record.key or ""
        first = await led(nodes, record)
        (second,) = (node for node in nodes if node is not first)
        await second.directory.open(S, None)
        first.replicas.recruiting.wanted = lambda partition: 0
        replica = second.replicas.find(key)
        assert replica is not None
        second.replicas.end(replica)
        await until(lambda: first.led(key, followers=0))
        if has:
            await second.replicas.host(key)
        await first.aclose()
        await forget(coordinator)
        await until(lambda: second.members.gone(first.name))
        with pytest.raises((PeerUnavailable, OutcomeUnknown, Lost)):
            await second.append(key, "one", timeout_s=0.5)
        second.replicas.retained = lambda partition: 7
        while not lost(second):
            await second.directory.lost(S, key)
            await asyncio.sleep(0.05)
        assert lost(second) == (LostPartition(key, ((second.name, 7),)),)
        with pytest.raises(Lost):
            await second.append(key, "one")


async def test_a_partition_without_live_replicas_is_reported_once_and_replaced() -> None:
    async with benches(3, lost_s=1.5) as nodes:
        record = await nodes[0].directory.open(S, b"s", followers=1)
        key = record.key or ""
        first = await led(nodes, record)
        follower = first.at(key).configuration.followers[0][0]  # type: ignore[union-attr]
        for node in nodes:
            node.replicas.recruiting.wanted = lambda partition: 0
        both = [node for node in nodes if node is first or node.name == follower]
        (other,) = (node for node in nodes if node not in both)
        await other.directory.open(S, None)
        await asyncio.gather(*(node.aclose() for node in both))
        other.replicas.retained = lambda partition: 5
        await until(lambda: lost(other))  # it takes care of the record itself
        now = other.directory.records.find(S)
        assert now is not None
        again = await other.directory.placed(now, now)
        assert (again.number, again.generation) == (1, record.generation)
        hosted = await until(lambda: other.at(again.key or ""))
        assert hosted.configuration.epoch > EPOCHS  # its grants are none of the one before
        assert await other.directory.take_lost(S) == (LostPartition(key, ((other.name, 5),)),)
        assert await other.directory.take_lost(S) == ()


class Unanswered(ProcessCoordinator):
    """Does what it is asked to change, once, and does not say so."""

    silent = False

    async def swap(self, key: str, expected: bytes | None, value: bytes | None) -> bytes | None:
        found = await super().swap(key, expected, value)
        if self.silent and key == f"streams/{S}":
            self.silent = False
            raise OutcomeUnknown("it was not answered")
        return found


async def test_a_lost_partition_is_reported_again_after_an_unknown_outcome() -> None:
    coordinator = Unanswered()
    async with benches(1, coordinator) as (node,):
        record = await node.directory.open(S, b"s")
        one = LostPartition("gone", (("x", 3),))
        await node.directory.records.change(record, lambda now: _losing(now, one))
        coordinator.silent = True
        with pytest.raises(OutcomeUnknown):
            await node.directory.take_lost(S)
        assert await node.directory.take_lost(S) == (one,)
        assert await node.directory.take_lost(S) == ()


def _losing(record: Record, one: LostPartition) -> Record:
    if one in record.lost:
        return record
    return msgspec.structs.replace(record, version=record.version + 1, lost=(*record.lost, one))


async def test_partitions_without_a_stream_record_are_deleted() -> None:
    coordinator: Coordinator = ProcessCoordinator()
    async with benches(2, coordinator, lost_s=0.2) as nodes:
        record = await nodes[0].directory.prepare(S, b"s")
        await led(nodes, record)
        await asyncio.sleep(0)
        assert nodes[0].directory.names(record.key or "")  # it gets its name later
        nodes[0].directory._prepared.clear()  # as when its maker has ended
        for node in nodes:
            node.directory._care_s = 0.05
        await until(lambda: not any(node.replicas.find(record.key or "") for node in nodes))


async def test_a_published_restored_stream_survives_a_discard() -> None:
    """The client may end while the answer to its last request is on its way."""
    async with benches(1) as [node]:
        record = await node.directory.prepare(S, b"s")
        await node.directory.publish(record)
        await node.directory.discard(record)
        assert await node.append(record.key or "", "a") == (0,)


# Records as a directory sees them change.


async def test_a_record_watch_continues_after_an_invalid_value_was_written(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = ProcessCoordinator()
    async with benches(1, coordinator) as [node]:
        record = await node.directory.open(S, b"s")
        before, later = encode(record), msgspec.structs.replace(record, version=record.version + 1)
        with caplog.at_level(logging.ERROR):
            await coordinator.swap(f"streams/{S}", before, b"\xc1")
            await until(lambda: "no record" in caplog.text)
        await coordinator.swap(f"streams/{S}", b"\xc1", encode(later))
        await until(lambda: node.directory.records.find(S) == later)


# Followers, and what is left of a replica that has ended.

KEY = "rollouts/s0/0-n0"


def full(*_: object) -> NoReturn:
    raise Backpressure("there is no space left on the disk")


async def test_another_follower_is_recruited_when_the_first_choice_has_a_full_disk() -> None:
    async with benches(3) as nodes:
        leader = nodes[0]
        (first,) = leader.replicas.recruiting.others(KEY, leader.name, 1)
        refusing = next(node for node in nodes if node.name == first)
        refusing.replicas._logs = full
        made = await leader.replicas.create(KEY, leader.name, followers=1)
        assert not made.followers, "it goes on with fewer"

        def follower() -> Bench | None:
            hosted = leader.at(KEY)
            names = [] if hosted is None else [name for name, _ in hosted.configuration.followers]
            return next((node for node in nodes if node.name in names), None)

        assert await until(follower) not in (leader, refusing)


async def test_the_watch_of_an_ended_replica_stops() -> None:
    async with benches(1) as [node]:
        await node.replicas.create(KEY, node.name)
        hosted = node.replicas.find(KEY)
        assert hosted is not None
        watching = hosted.watching
        assert watching is not None
        node.replicas.end(hosted)
        await asyncio.wait([watching], timeout=10)
        assert watching.done()


# Nodes that come back: as the same process after a while, or as a new one under the same name.

P = "rollouts/s1/0-n1"


async def test_a_leader_that_returns_after_an_absence_is_asked_again() -> None:
    async with benches(3) as [node, leader, third]:
        await node.replicas.create(P, leader.name, 1)
        await until(lambda: leader.led(P))
        await absent(leader, [node, third])
        await back(leader, [node, third])
        await until(lambda: leader.at(P))
        for other in (node, third):
            await other.append(P, "row")
            assert (await other.lease(P, TASKS[0], 1)).rows
