"""Columns of durable partitions, where the disk fails once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.config import NodeConfig
from dataplane.errors import DirectoryUnusable
from dataplane.node.clustered.durable import DurableColumns
from dataplane.node.clustered.retained_shards import RetainedShards
from dataplane.node.shards.needed_shards import NeededShards
from dataplane.store.store import Store
from tests.unit.store.stores import layout

PARTITION = "rollouts/s0/0-6e.durable"


class _Notes:
    def __init__(self) -> None:
        self.kept: dict[str, bytes | None] = {}
        self.broken = True

    def load(self) -> dict[str, bytes]:
        return {}

    async def write(self, changes: dict[str, bytes | None], *, lazily: bool = False) -> None:
        if self.broken:
            self.broken = False
            raise DirectoryUnusable("the disk failed once", path="", reason="failed")
        self.kept.update(changes)


class _Keeping:
    me = "6e" * 8

    def __init__(self) -> None:
        self.of = _Notes()
        self.persistence = _Persistence()

    def notes(self, kind: str) -> _Notes:
        return self.of


class _Persistence:
    async def persist(self, shards: object, deadline: object, *, with_next: bool) -> None:
        return


class _Homes:
    def number(self, key: tuple[bytes, int]) -> int:
        return key[1]


class _Partitions:
    class replicas:
        @staticmethod
        def find(partition: str) -> None:
            return None


async def test_a_partition_name_that_failed_to_persist_is_written_with_the_next_columns() -> None:
    """Or after a restart nobody asks what it needs here, and what it needs is freed."""
    keeping: Any = _Keeping()
    nothing: Any = None
    homes: Any = _Homes()
    columns = DurableColumns(keeping, homes, nothing)
    partitions: Any = _Partitions()
    columns.partitions = partitions
    with pytest.raises(DirectoryUnusable):
        await columns.keep(PARTITION, [(bytes.fromhex(keeping.me), 1)], Deadline.after(1.0))
    await columns.keep(PARTITION, [(bytes.fromhex(keeping.me), 2)], Deadline.after(1.0))
    assert PARTITION in keeping.of.kept


# Shards that partitions need: entries of outboxes are heard once, and what is gone needs nothing.

ME = b"me......"


class Kept:
    def __init__(self, directory: Path) -> None:
        self.store = Store(NodeConfig(memory="1MiB", spill=0, spill_dir=directory, prewarm=0))
        self.retained = RetainedShards(NeededShards(ME, self.store))

    def put(self) -> BatchRef:
        shard = self.store.put_now("client", bytes(64), layout(64), scope="", holder="")
        assert shard is not None
        return ref_to(ME, 1, [("x", Field("dense", "uint8", (64,)), 64, shard, 0)])

    @property
    def shards(self) -> int:
        return len(self.store.shards)


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[Kept]:
    made = Kept(tmp_path)
    yield made
    await made.store.aclose()


async def test_a_repeated_settlement_entry_releases_its_shards_once(kept: Kept) -> None:
    ref = kept.put()
    kept.retained.retain("s/1/0-a", ref)
    kept.retained.retain("s/1/0-a", ref)
    kept.retained.settled("s/1/0-a", 1, [ref.encode()])
    kept.retained.settled("s/1/0-a", 1, [ref.encode()])
    assert kept.shards == 1
    kept.retained.settled("s/1/0-a", 2, [ref.encode(), ref.encode()])
    assert (kept.shards, kept.retained.holders) == (0, [])


async def test_a_shard_retained_by_two_partitions_is_freed_after_the_last_release(kept: Kept) -> None:
    ref = kept.put()
    kept.retained.retain("s/1/0-a", ref)
    kept.retained.retain("s/1/1-b", ref)
    kept.retained.drop("s/1/0-a")
    kept.retained.drop("s/1/0-a")
    assert kept.shards == 1
    kept.retained.settled("s/1/1-b", 1, [ref.encode()])
    assert kept.shards == 0
