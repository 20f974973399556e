"""Which coordinator a data directory goes with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from dataplane.coordinator.process import ProcessCoordinator
from dataplane.node.partitions.era import KEY, Era
from dataplane.store.durable.database import Database, DirectoryUnusable, Journal, Notes
from tests.unit.node.partitions.bench import until


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
        await until(lambda: coordinator._registry._values.get(KEY) not in (None, before))
    async with started(tmp_path, coordinator) as running:
        assert not running.done()
