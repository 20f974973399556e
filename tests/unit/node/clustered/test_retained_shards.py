"""Shards that partitions need: entries of outboxes are heard once, and what is gone needs nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.batch.ref import BatchRef
from dataplane.config import NodeConfig
from dataplane.node.clustered.retained_shards import RetainedShards
from dataplane.node.shards.needed_shards import NeededShards
from dataplane.store.store import Store
from tests.unit.store.stores import layout

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
