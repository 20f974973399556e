"""Placement tables as a directory sees them change."""

from __future__ import annotations

import logging

import msgspec
import pytest

from dataplane.coordinator.process import ProcessCoordinator
from dataplane.node.partitions import table as tables
from tests.unit.node.partitions.bench import benches, until
from tests.unit.node.partitions.streambench import S, StreamBench


async def test_a_table_is_watched_on_though_somebody_wrote_what_is_none(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = ProcessCoordinator()
    async with benches(1, coordinator, make=StreamBench) as [node]:
        table = await node.opened()
        before, later = tables.encode(table), msgspec.structs.replace(table, version=table.version + 1)
        with caplog.at_level(logging.ERROR):
            await coordinator.swap(f"placements/{S}", before, b"\xc1")
            await until(lambda: "no placement table" in caplog.text)
        await coordinator.swap(f"placements/{S}", b"\xc1", tables.encode(later))
        await until(lambda: node.directory.find(S) == later)


async def test_partitions_of_a_stream_that_another_drops_are_forgotten() -> None:
    async with benches(2, make=StreamBench) as [node, other]:
        table = await node.opened()
        await other.directory.read(S)
        key = table.key(0)
        await other.router._read(key)
        other.router._leaders[key] = node.name
        await node.directory.drop(S)
        await until(lambda: other.directory.find(S) is None)
        assert key not in other.router.configurations
        assert key not in other.router._leaders
