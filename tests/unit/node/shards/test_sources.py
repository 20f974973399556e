"""Where who wants a shard is sent: to few at a place, and to those who have it by then."""

from __future__ import annotations

import asyncio
from collections import Counter

from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.batch.rows import RowIndices
from dataplane.clock import Deadline
from dataplane.node.shards import needed_shards
from dataplane.node.shards.needed_shards import NeededShards
from dataplane.node.shards.offers import Sources
from tests.cases import each_case
from tests.unit.store.stores import content, layout, moving

ME = b"me"
LONG_S = 10.0


async def choose(sources: Sources, reader: bytes, *avoid: bytes, patience_s: float = LONG_S) -> bytes:
    return await sources.choose(1, reader, avoid, patience_s, Deadline.after(LONG_S))


async def test_the_first_reader_uses_the_owner_and_the_second_uses_the_first() -> None:
    sources = Sources(ME)
    assert await choose(sources, b"a") == ME
    second = asyncio.create_task(choose(sources, b"b"))
    await asyncio.sleep(0.01)
    assert not second.done()
    sources.has(1, b"a")
    sources.ended(1, ME)
    assert await second == b"a"
    assert await choose(sources, b"c") == ME


@each_case(("count", "here"), [(6, 3), (15, 4), (31, 5)])
async def test_each_round_of_reads_doubles_the_sources(count: int, here: int) -> None:
    """All come at once; each read takes a round. As many rounds as doublings, each with at most one read here."""
    sources = Sources(ME)
    readers = [b"%d" % i for i in range(count)]
    waiting = {reader: asyncio.create_task(choose(sources, reader)) for reader in readers}
    places: Counter[bytes] = Counter()
    rounds = 0
    while waiting:
        rounds += 1
        for _ in range(3):
            await asyncio.sleep(0)
        going = {reader: task.result() for reader, task in waiting.items() if task.done()}
        assert max(Counter(going.values()).values()) == 1
        for reader, place in going.items():
            del waiting[reader]
            places[place] += 1
            sources.has(1, reader)
            sources.ended(1, place)
    assert rounds <= here
    assert places[ME] <= here
    assert not sources._readers
    assert not sources._changed


# Shards that rows need.

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
