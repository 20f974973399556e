from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any

import pytest

from dataplane.batch.field import Field
from dataplane.batch.layout import ColumnLayout, ShardLayout
from dataplane.batch.rows import RowIndices
from dataplane.clock import Deadline
from dataplane.errors import Backpressure
from dataplane.store import residency, spill
from dataplane.store.budget import Purpose
from dataplane.store.store import Pinned, Store
from dataplane.store.stored import SPARE
from tests.cases import each_case
from tests.processes import WAIT_S
from tests.unit.store.stores import layout, moving, soon

KIB, MIB = 1 << 10, 1 << 20
SIZE = 64 * KIB  # of every shard here
MEMORY = 64 * SIZE

LAYOUT = ShardLayout((("x", ColumnLayout(Field("dense", "uint8", (SIZE,)), 1, 1, ((0, SIZE),))),)).encode()


def content(seed: int) -> bytes:
    return bytes((seed + i) % 251 for i in range(256)) * (SIZE // 256)


def running(directory: Path, **settings: Any) -> AbstractAsyncContextManager[Store]:
    defaults = {"memory": MEMORY, "spill": 64 * MIB, "spill_dir": directory, "compression": "never"}
    return moving(defaults | settings)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0)  # sees every turn of the loop, so no state passes unseen


async def at_rest(store: Store) -> None:
    """Waits until nothing moves and nothing is about to."""
    quiet = 0
    while quiet < 50:
        await asyncio.sleep(0)
        moving = any(shard.moving for shard in store.shards.values()) or store.residency._wake.is_set()
        quiet = 0 if moving else quiet + 1
        if moving:
            await asyncio.sleep(0.0005)


async def fill(store: Store) -> list[int]:
    """Puts until neither memory nor disk takes one more."""
    numbers: list[int] = []
    refused = 0
    while refused < 2:
        try:
            numbers.append(await put(store, len(numbers), seconds=0.05))
            refused = 0
        except Backpressure:  # the disk may have been slow
            refused += 1
            await at_rest(store)
    return numbers


async def put(store: Store, seed: int, *, seconds: float = WAIT_S) -> int:
    deadline = Deadline.after(seconds)
    return await store.put("producer", content(seed), LAYOUT, deadline, scope="", holder="producer")


async def pin(store: Store, *numbers: int) -> list[Pinned]:
    return await store.pin("reader", numbers, soon())


def read(store: Store, pinned: Pinned) -> bytes:
    with store.arena.view(pinned.extent) as view:
        return bytes(view[:SIZE])


def on_disk(store: Store) -> list[int]:
    assert store.disk.directory is not None
    return sorted(int(name.removesuffix(".spill"), 16) for name in os.listdir(store.disk.directory))


async def test_a_queue_of_twice_the_memory_restores_no_more_than_needed(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        numbers = [await put(store, seed) for seed in range(128)]
        for seed, number in enumerate(numbers):
            (pinned,) = await pin(store, number)
            assert read(store, pinned) == content(seed)
            store.unpin("reader", [number])
            store.free([number])
        await until(lambda: not store.disk.used)
        must = 64 * SIZE
        now = store.statistics()
        assert must <= now.disk.read <= 1.05 * must
        assert (now.budget.used, now.disk.used, now.shards) == (0, 0, 0)


@each_case(
    ("low", "files"),
    [(0.5, 17), (0.125, 41)],  # at once, and in more than one go
)
async def test_spilling_ahead_runs_from_the_high_to_the_low_watermark(tmp_path: Path, low: float, files: int) -> None:
    async with running(tmp_path, high_watermark=0.75, low_watermark=low) as store:
        numbers = [await put(store, seed) for seed in range(48)]
        await at_rest(store)
        assert on_disk(store) == [], "at the high watermark, not above it"
        numbers.append(await put(store, 48))
        await until(lambda: store.disk.statistics().files == files)
        await at_rest(store)
        assert on_disk(store) == numbers[-files:], "and no further; the newest go"
        now = store.statistics()
        assert now.budget.used == 49 * SIZE, "their memory stays until somebody needs it"
        assert now.spilled_shards == 0
        numbers += [await put(store, seed) for seed in range(49, 64)]
        await at_rest(store)
        assert store.disk.statistics().files == files, "below the high watermark again"
        held = store.pin_now("reader", numbers)
        assert held is not None
        assert all(read(store, pinned) == content(seed) for seed, pinned in enumerate(held))
        assert store.disk.statistics().read == 0


async def test_spill_files_of_resident_shards_are_deleted_for_shards_that_must_spill(tmp_path: Path) -> None:
    """The quota is full of copies of shards that were read back and are pinned: they help nobody there."""
    quota = 8 * SIZE
    async with running(tmp_path, spill=quota + 2 * SIZE, high_watermark=1.0, low_watermark=1.0) as store:
        numbers = [await put(store, seed) for seed in range(72)]
        await at_rest(store)
        assert store.disk.used == quota
        gone = on_disk(store)
        store.free([n for n in numbers if n not in gone][:8])
        await pin(store, *gone)
        later = [await put(store, 100 + seed) for seed in range(8)]
        await at_rest(store)
        assert store.disk.used <= quota + 2 * SIZE
        assert not set(later) & set(gone)
        for number in gone:
            assert store.shards[number].extent is not None


async def test_spilled_shards_can_be_restored_with_memory_and_disk_full(tmp_path: Path) -> None:
    """A producer filled both before a slow consumer came to what is on disk: the two must be able to change places."""
    async with running(tmp_path, spill=12 * SIZE) as store:
        numbers = await fill(store)
        producer = asyncio.create_task(put(store, 1000))
        for number in [*on_disk(store), *numbers]:
            assert (await pin(store, number))[0].shard == number
            store.unpin("reader", [number])
        store.free(numbers)
        await producer
        assert store.disk.used <= 12 * SIZE


@each_case("sizes", [(1000, 300_000), (4096, 300_000), (1000, 4096, 300_000), (1000,), (300_000,)])
@each_case("seed, quota", [(2, MEMORY), (3, MEMORY), (2, 4 * MEMORY)])
async def test_shards_of_any_size_are_read_back_with_memory_and_disk_full(
    tmp_path: Path, sizes: tuple[int, ...], seed: int, quota: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while producers take all that comes free, and readers add columns to what they read; and if the disk is
    smaller than its quota."""
    chance = random.Random(seed)
    stores: list[Store] = []
    there = spill.pwrite

    def free(_: int) -> int:
        return MEMORY - sum(each.disk.used for each in stores)

    def pwrite(fd: int, chunk: memoryview, start: int) -> None:
        if free(fd) < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        there(fd, chunk, start)

    monkeypatch.setattr(spill, "_free", free)
    monkeypatch.setattr(spill, "pwrite", pwrite)
    monkeypatch.setattr(residency, "_RETRY_S", 0.01)
    async with running(tmp_path, spill=quota) as store:
        stores.append(store)

        async def write(purpose: Purpose, sizes: Sequence[int], deadline: Deadline) -> int:
            size = chance.choice(sizes)
            where: Any = {"scope": "", "holder": "producer", "purpose": purpose}
            number = store.put_now("producer", bytes(size), layout(size), **where)
            return number or await store.put("producer", bytes(size), layout(size), deadline, **where)

        async def produce() -> None:
            while True:
                await write("append", sizes, soon())

        async def consume(reader: str, mine: list[int]) -> None:
            for i in range(0, len(mine), 2):
                await store.pin(reader, mine[i : i + 2], soon())
                with suppress(Backpressure):
                    await write("extend", [4096, 50_000], Deadline.after(0.02))
                store.unpin(reader, mine[i : i + 2])

        numbers: list[int] = []
        refused = 0
        while refused < 3:
            try:
                numbers.append(await write("append", sizes, Deadline.after(0.02)))
            except Backpressure:
                refused += 1
                await at_rest(store)
        producers = [asyncio.create_task(produce()) for _ in range(3)]
        try:
            await asyncio.gather(*(consume(f"reader {i}", numbers[:120][i::2]) for i in range(2)))
        finally:
            for each in producers:
                each.cancel()
            await asyncio.gather(*producers, return_exceptions=True)


async def test_new_bytes_wait_for_stored_ones_and_not_for_memory(tmp_path: Path) -> None:
    async with running(tmp_path, spill=12 * SIZE) as store:
        numbers = await fill(store)
        assert len(numbers) == 64 + 12 - 2, "room for one exchange is left"
        with pytest.raises(Backpressure, match="the disk budget is full"):
            await put(store, 1, seconds=0.01)
        producer = asyncio.create_task(put(store, 1))
        await until(lambda: store.budget.waiting)
        await at_rest(store)
        spilled = [number for number in numbers if store.shards[number].extent is None]
        assert store.budget.used + len(spilled) * SIZE == len(numbers) * SIZE
        assert not store.budget.shortfall, "no memory is taken for it"
        store.free(spilled[:1])
        await producer


async def test_appends_leave_memory_for_extends_while_the_disk_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(directory: int, path: Path) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def put_for(purpose: Purpose, seconds: float) -> None:
        deadline = Deadline.after(seconds)
        await store.put("producer", content(0), LAYOUT, deadline, scope="", holder="producer", purpose=purpose)
        await at_rest(store)

    monkeypatch.setattr(spill, "create", refuse)
    async with running(tmp_path) as store:
        with pytest.raises(Backpressure, match="No space left"):
            while True:
                await put_for("append", 0.01)
        for _ in range(MEMORY // SIZE // SPARE):
            await put_for("extend", 0.0)


async def test_new_bytes_are_admitted_once_the_largest_shard_is_freed_though_it_is_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "_LATE_S", 1e6)  # no timer wakes anything
    async with running(tmp_path, spill=MEMORY) as store:
        where: Any = {"scope": "", "holder": "producer"}
        large = await store.put("producer", bytes(8 * SIZE), layout(8 * SIZE), soon(), **where)
        await pin(store, large)
        await fill(store)
        producer = asyncio.create_task(put(store, 1))
        await until(lambda: store.budget.waiting)
        await at_rest(store)
        assert not producer.done()
        store.free([large])
        await producer
        store.unpin("reader", [large])


async def test_appends_are_admitted_again_once_the_disk_works_again(tmp_path: Path) -> None:
    async with running(tmp_path, high_watermark=1.0) as store:
        store.disk.refused("spilling", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        for seed in range(2 * MEMORY // SIZE):
            where: Any = {"scope": "", "holder": "producer", "purpose": "append"}
            await store.put("producer", content(seed), LAYOUT, soon(), **where)
        assert not store.disk.error


async def test_the_memory_of_rows_that_are_freed_while_pinned_is_released_with_the_last_pin(tmp_path: Path) -> None:
    rows, width = 16, SIZE
    column = ColumnLayout(Field("dense", "uint8", (width,)), rows, rows, ((0, rows * width),))
    described = ShardLayout((("x", column),)).encode()
    async with running(tmp_path) as store:
        number = await store.put("a", bytes(rows * width), described, soon(), scope="", holder="a")
        used = store.budget.used
        await pin(store, number)
        await pin(store, number)
        store.free_part(number, [0], RowIndices.range(0, rows // 2), punch=True)
        store.unpin("reader", [number])
        assert store.budget.used == used
        store.unpin("reader", [number])
        assert store.budget.used == used - rows // 2 * width
        store.free([number])
        assert store.budget.used == 0


async def test_a_freed_shard_that_is_pinned_has_no_file(tmp_path: Path) -> None:
    """Else it would use the disk for bytes that nobody reads back."""
    async with running(tmp_path, spill=12 * SIZE) as store:
        await fill(store)
        number = on_disk(store)[-1]
        await pin(store, number)
        assert number in on_disk(store)
        store.free([number])
        await until(lambda: number not in on_disk(store))
        store.unpin("reader", [number])


async def test_a_hanging_write_holds_up_no_request_that_clean_memory_satisfies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "_LATE_S", 0.01)
    async with running(tmp_path) as store:
        for seed in range(MEMORY // SIZE):
            await put(store, seed)
        await at_rest(store)
        clean = store._stored.clean // SIZE
        answers, write = asyncio.Event(), store.disk.write

        async def hang(*arguments: Any) -> Any:
            await answers.wait()
            return await write(*arguments)

        monkeypatch.setattr(store.disk, "write", hang)
        for seed in range(clean):
            await put(store, seed)
        assert store.residency._batch, "a write has begun meanwhile, and hangs"
        answers.set()


async def test_a_full_disk_is_no_error_once_memory_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "_free", lambda _: 0)
    monkeypatch.setattr(residency, "_RETRY_S", 0.01)
    async with running(tmp_path) as store:
        numbers = [await put(store, seed) for seed in range(60)]
        await until(lambda: "No space left" in store.disk.error)
        store.free(numbers)
        await until(lambda: not store.disk.error)
