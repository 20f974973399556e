"""Which configuration a partition goes on with after its coordinator was wiped, by what replicas have noted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from dataplane.coordinator.process import ProcessCoordinator
from dataplane.node.partitions.finding import again, named
from dataplane.node.partitions.record import Record, encode
from dataplane.node.partitions.remembered import ERA, Known, Remembered
from dataplane.replication.configuration import Configuration
from dataplane.store.durable.database import Database
from dataplane.store.durable.journal import Journal
from dataplane.store.durable.notes import Notes
from tests.unit.node.partitions.bench import until

A, B, C = ("a", 1), ("b", 2), ("c", 3)
ERA_1 = b"one"


def known(epoch: int, *replicas: tuple[str, int], asked: tuple[Configuration, ...] = ()) -> Known:
    return Known(ERA_1, Configuration(epoch, replicas[0], replicas[1:]), asked)


def nobody(node: str) -> bool:
    return False


def test_all_that_the_newest_names_are_heard_and_it_goes_on_two_epochs_later() -> None:
    heard = {A: known(3, A, B)}
    assert named(heard) == {A, B}
    heard[B] = known(3, A, B)
    assert named(heard) <= heard.keys()
    assert again(heard, nobody) == Configuration(5, A, (B,))


def test_a_majority_is_not_enough_where_a_leader_went_on_alone() -> None:
    heard = {A: known(3, C, A, B), B: known(3, C, A, B)}
    assert named(heard) - heard.keys() == {C}
    heard[C] = known(4, C)
    assert again(heard, nobody) == Configuration(6, C)


def test_who_was_dropped_learns_of_a_newer_configuration_by_whom_it_knows() -> None:
    heard = {A: known(3, A, B)}
    heard[B] = known(5, B, C)
    assert named(heard) - heard.keys() == {C}, "and who took A's place has to be heard"


def test_a_replica_that_was_asked_for_may_have_gone_on() -> None:
    joined = Configuration(4, A, (B, C))
    heard = {A: known(3, A, B, asked=(joined,)), B: known(3, A, B)}
    assert named(heard) - heard.keys() == {C}
    heard[C] = known(4, A, B, C)
    assert named(heard) <= heard.keys()
    assert again(heard, nobody) == Configuration(6, A, (B, C))
    heard = {A: known(3, A, B, asked=(joined,)), B: known(3, A, B)}
    assert again(heard, lambda node: node == "c") == Configuration(6, A, (B,)), "one that is given up"


def test_a_leader_that_is_given_up_is_followed_by_a_follower() -> None:
    heard = {B: known(3, A, B)}
    assert again(heard, lambda node: node == "a") == Configuration(5, B)
    assert again(heard, lambda node: True) is None


@asynccontextmanager
async def remembered(directory: Path, coordinator: ProcessCoordinator) -> AsyncIterator[Remembered]:
    database = Database(directory / "node.sqlite")
    journal = Journal(database)
    found = Remembered(coordinator, Notes(database, journal, "configurations"), Notes(database, journal, "records"))
    running = found._background.spawn(found.run())
    try:
        yield found
    finally:
        await journal.write(lambda sql: None)
        running.cancel()
        await found.aclose()
        journal.close()
        database.close()


async def test_what_was_forgotten_is_told_from_what_was_deleted(tmp_path: Path) -> None:
    configuration, wanted = Configuration(2, A, (B,)), Configuration(3, B)
    record = Record(4, "rows", "s1", b"", 1, durable=True).made_by("a")
    partition = record.key or ""
    coordinator = ProcessCoordinator()
    async with remembered(tmp_path, coordinator) as here:
        assert here.find(partition) is None
        await here.know(partition, configuration)
        here.seen(partition)  # before the era is known
        await here.begun.wait()
        await here.ask(partition, wanted)
        here.keep("streams/rows", encode(record))
        await until(lambda: (found := here.find(partition)) is not None and found.era == here.era)
    async with remembered(tmp_path, coordinator) as here:
        assert here.missing(partition), "nobody knows yet"
        await here.begun.wait()
        assert here.find(partition) == Known(here.era, configuration, (wanted,))
        assert not here.missing(partition)
    wiped = ProcessCoordinator()
    async with remembered(tmp_path, wiped) as here:
        await here.begun.wait()
        assert await wiped.read(ERA) == here.era != await coordinator.read(ERA)
        assert here.missing(partition)
        here.keep("streams/rows", None)
        here.forget(partition)
        assert here.record("streams/rows") is None
        assert here.told(partition) == b""
