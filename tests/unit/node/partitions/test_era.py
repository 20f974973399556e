"""Which coordinator a data directory goes with."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dataplane.coordinator.base import Coordinator
from dataplane.errors import DirectoryUnusable, OutcomeUnknown
from dataplane.node.clustered.durable import PartitionStorage
from dataplane.node.partitions.era import KEY, Era
from dataplane.node.partitions.record import DURABLE
from dataplane.replication.log import ExtendLog
from dataplane.replication.messages import LogEntry
from dataplane.store.durable.database import Database, Journal, Notes
from dataplane.store.durable.directory import DataDirectory
from dataplane.store.durable.shards import DurableShards
from tests.coordinator import ProcessCoordinator
from tests.unit.node.partitions.bench import WAIT_S, Bench, benches, until


@asynccontextmanager
async def started(directory: Path, coordinator: ProcessCoordinator) -> AsyncIterator[asyncio.Task[None]]:
    """A node on its directory, once it knows its coordinator, or refuses to run."""
    database = Database(directory / "node.sqlite")
    journal = Journal(database)
    era = Era(coordinator, Notes(database, journal, "era"), str(directory))
    running = asyncio.ensure_future(era.run())
    try:
        await until(lambda: era.known.is_set() or running.done())
        yield running
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError, DirectoryUnusable):
            await running
        await journal.write(lambda sql: None)
        journal.close()
        database.close()


async def test_a_restarted_durable_node_refuses_a_different_coordinator(tmp_path: Path) -> None:
    coordinator, another = ProcessCoordinator(), ProcessCoordinator()
    for _ in range(2):
        async with started(tmp_path, coordinator) as running:
            assert not running.done()
    for emptied in (True, False):
        if not emptied:
            await another.swap(KEY, None, b"of another")
        async with started(tmp_path, another) as running:
            with pytest.raises(DirectoryUnusable, match="Restore etcd's data"):
                await running
        assert await another.read(KEY) == (None if emptied else b"of another")
    async with started(tmp_path, coordinator) as running:
        assert not running.done(), "its directory is as it was"


async def test_a_running_node_records_the_new_era_of_an_emptied_coordinator(tmp_path: Path) -> None:
    coordinator = ProcessCoordinator()
    async with started(tmp_path, coordinator):
        before = await coordinator.read(KEY)
        await coordinator.swap(KEY, before, None)
        await until(lambda: coordinator._values.get(KEY) not in (None, before))
    async with started(tmp_path, coordinator) as running:
        assert not running.done()


# The logs of durable partitions, as one node opens and deletes them.

PARTITION = f"s/0{DURABLE}"


@asynccontextmanager
async def node(directory: Path, coordinator: Coordinator | None = None) -> AsyncIterator[tuple[Bench, DurableShards]]:
    durable = DurableShards(DataDirectory(directory))
    keeping = PartitionStorage(cast(Any, SimpleNamespace(durable=durable)))
    bench = Bench("n9", coordinator or ProcessCoordinator(), keeps=True, logs=keeping.log)
    try:
        yield bench, durable
    finally:
        await bench.aclose()
        await durable.aclose()


async def test_a_hanging_disk_blocks_only_durable_partitions(tmp_path: Path) -> None:
    answers = threading.Event()
    async with node(tmp_path) as (bench, durable):
        old = await bench.replicas.host(f"s/1{DURABLE}")
        hung = durable.journal.run(durable.directory.database.read, lambda sql: answers.wait())
        waiting = [asyncio.ensure_future(bench.replicas.host(PARTITION)) for _ in range(2)]
        bench.replicas.end(old, forget=True)
        assert not (await bench.replicas.host("s/0")).durable
        assert not any(each.done() for each in waiting)
        answers.set()
        first, second = await asyncio.gather(*waiting)
        assert first is second, "one log is opened once"
        await hung


async def test_other_nodes_get_the_error_of_the_disk_that_ended_the_only_replica(tmp_path: Path) -> None:
    """Also a request that waits; and requests that were sent before have an unknown outcome."""
    coordinator = ProcessCoordinator()
    async with node(tmp_path, coordinator) as (bench, durable), benches(1, coordinator) as (other,):
        await bench.join()
        await bench.replicas.create(PARTITION, "n9")
        await other.append(PARTITION, "x")
        assert (await other.lease(PARTITION, "t", 1)).rows
        waiting = asyncio.ensure_future(other.lease(PARTITION, "t", 1, timeout_s=WAIT_S))
        await until(lambda: len(bench.replicas.find(PARTITION).waiters) == 1)  # type: ignore[union-attr]
        durable.directory.database.close()
        with pytest.raises(OutcomeUnknown, match="has stopped"):
            await other.append(PARTITION, "y")
        with pytest.raises(OutcomeUnknown, match="has stopped"):
            await waiting
        for asking in (bench, other):
            with pytest.raises(DirectoryUnusable, match="has stopped"):
                await asking.append(PARTITION, "z")


async def test_a_partition_hosted_again_after_its_log_was_deleted_starts_empty(tmp_path: Path) -> None:
    async with node(tmp_path) as (bench, _):
        hosted = await bench.replicas.host(PARTITION)
        assert hosted._disk is not None
        await hosted._disk.save([ExtendLog(1, (LogEntry(1, b"old"),))])
        bench.replicas.end(hosted, forget=True)
        again = await bench.replicas.host(PARTITION)
        assert again.me != hosted.me
        assert again._disk is not None
        assert again._disk.load()[1].entries == []
        await again._disk.save([ExtendLog(1, (LogEntry(1, b"new"),))])
        assert [entry.command for entry in again._disk.load()[1].entries] == [b"new"]
