"""Records as a directory sees them change."""

from __future__ import annotations

import logging

import msgspec
import pytest

from dataplane.coordinator.process import ProcessCoordinator
from dataplane.node.partitions.record import encode
from tests.unit.node.partitions.bench import benches, until

S = "rollouts"


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
