"""Shards that rows need."""

from __future__ import annotations

from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.batch.rows import RowIndices
from dataplane.node.shards import needed_shards
from dataplane.node.shards.needed_shards import NeededShards
from tests.unit.store.stores import content, layout, moving

NODE = b"the-node"


async def test_rows_that_are_appended_again_and_again_cost_no_memory() -> None:
    async with moving({"memory": "1MiB", "spill": 0}) as store:
        number = store.put_now("c", content(1, 64), layout(64), scope="", holder="c")
        assert number is not None
        needed, key = NeededShards(NODE, store), (NODE, number)
        ref = ref_to(NODE, 1, [("x", Field("dense", "uint8", (64,)), 64, number, 0)])
        needed.keep_too(ref)
        for _ in range(2 * needed_shards._MANY):
            needed.keep_too(ref)
            needed.done(ref, ref.shards())
        needed.free_parts([(number, (0,), RowIndices(0, 1))])
        assert len(needed._spent[key]) <= needed_shards._MANY
        assert store.shards.get(number) is not None
        needed.unneed([key])
        assert store.shards.get(number) is None
        assert not needed._spent
