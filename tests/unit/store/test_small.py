"""Small shards in a store: packed into shared pages, spilled, read back and freed like any other."""

from __future__ import annotations

import asyncio
import random
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dataplane.clock import Deadline
from dataplane.store.extents import RangeSet
from dataplane.store.small_extents import MOST
from dataplane.store.store import Pinned, Store
from tests.cases import each_case
from tests.processes import WAIT_S
from tests.unit.store.stores import content, layout, moving

MIB = 1 << 20


def running(directory: Path, **settings: Any) -> AbstractAsyncContextManager[Store]:
    return moving({"memory": MIB, "spill": 64 * MIB, "spill_dir": directory} | settings)


async def put(store: Store, data: bytes, seconds: float = WAIT_S) -> int:
    now = store.put_now("p", data, layout(len(data)), scope="", holder="p")
    if now is not None:
        return now
    return await store.put("p", data, layout(len(data)), Deadline.after(seconds), scope="", holder="p")


async def pin(store: Store, number: int, client: str = "r") -> Pinned:
    (pinned,) = await store.pin(client, [number], Deadline.after(WAIT_S))
    return pinned


def read(store: Store, pinned: Pinned, nbytes: int) -> bytes:
    with store.arena.view(pinned.extent) as view:
        return bytes(view[:nbytes])


def used(store: Store) -> int:
    now = store.statistics()
    assert now.budget.used == store.arena.used <= now.resident
    return now.budget.used


@each_case("seed", range(4))
async def test_packed_small_shards_read_back_correctly_under_random_operations(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    async with running(tmp_path, memory=MIB) as store:
        rows: dict[int, bytes] = {}
        pinned: list[tuple[str, int, Pinned, bytes]] = []
        for step in range(800):
            what = chance.choice(["put", "put", "put", "free", "pin", "unpin", "look"])
            if what == "put":
                data = content(step, chance.choice([1, 64, 700, 5000, 9000, MOST, MOST + 1]))
                rows[await put(store, data)] = data
            elif what == "free" and rows:
                number = chance.choice(list(rows))
                store.free([number])
                del rows[number]
            elif what == "pin" and rows and len(pinned) < 6:
                number, client = chance.choice(list(rows)), chance.choice("ab")
                pinned.append((client, number, await pin(store, number, client), rows[number]))
            elif what == "unpin" and pinned:
                client, number, *_ = pinned.pop(chance.randrange(len(pinned)))
                store.unpin(client, [number])
            for _, _, held, data in pinned:
                assert read(store, held, len(data)) == data
            assert used(store) <= MIB
        for client, number, *_ in pinned:
            store.unpin(client, [number])
        for number, data in rows.items():
            assert read(store, await pin(store, number), len(data)) == data
            store.unpin("r", [number])
        store.free(rows)
        async with asyncio.timeout(WAIT_S):
            while used(store) or store.statistics().disk.used:
                await asyncio.sleep(0.001)


def runs(addresses: set[int]) -> list[tuple[int, int]]:
    """The addresses as maximal ranges, ascending."""
    found: list[tuple[int, int]] = []
    for address in sorted(addresses):
        if found and found[-1][1] == address:
            found[-1] = (found[-1][0], address + 1)
        else:
            found.append((address, address + 1))
    return found


steps = st.lists(
    st.tuples(st.sampled_from(["add", "remove"]), st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=40
)


@given(steps, st.integers(0, 90), st.integers(0, 90))
def test_a_range_set_is_a_set_of_addresses(done: list[tuple[str, int, int]], low: int, high: int) -> None:
    ranges, model = RangeSet(), set[int]()
    for what, start, size in done:
        these = set(range(start, start + size))
        if what == "add":
            assert ranges.add(start, start + size) == len(these - model)
            model |= these
        else:
            assert ranges.remove(start, start + size) == len(these & model)
            model -= these
        assert list(ranges) == runs(model)
    low, high = min(low, high), max(low, high)
    assert ranges.within(low, high) == runs(model & set(range(low, high)))
    assert ranges.covered(low, high) == len(model & set(range(low, high)))
