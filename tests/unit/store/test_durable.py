"""Durable shards: there again for the next node on the directory, in place, checked, freed page by page."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from dataplane.clock import Deadline
from dataplane.config import PAGE
from dataplane.errors import Backpressure, Corrupt, Freed
from dataplane.store.durable import database, files
from dataplane.store.durable.directory import DataDirectory
from dataplane.store.small_extents import MOST
from dataplane.store.store import Store
from tests.cases import each_case
from tests.mounts import mounted
from tests.processes import until
from tests.unit.store.stores import content, layout, moving, soon

MIB = 1 << 20
SIZES = [1, 64, 200, PAGE, MOST, MOST + 1, MIB // 8, 5 * MIB]


def running(directory: Path, **settings: Any) -> AbstractAsyncContextManager[Store]:
    """A store on the data directory, without room to spill."""
    defaults = {"memory": 32 * MIB, "spill": 0, "spill_dir": directory}
    return moving(defaults | settings, directory=DataDirectory(directory / "data"))


async def put(store: Store, data: bytes) -> int:
    return await store.put("p", data, layout(len(data)), soon(), scope="", holder="p")


async def read(store: Store, number: int) -> bytes:
    (pinned,) = await store.pin("r", [number], soon())
    try:
        return store.arena.read(pinned.extent)
    finally:
        store.unpin("r", [number])


def kept(directory: Path) -> list[Path]:
    return sorted((directory / "data" / "shards").iterdir())


async def test_durable_shards_are_recovered_by_the_next_node(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        shards = {await put(store, content(size, size)): size for size in SIZES}
        await put(store, b"not durable")
        await store.persistence.persist(shards, soon())
        before = store.shards.describe(shards)
    async with running(tmp_path) as store:
        assert await store.persistence.recover() == list(shards)
        assert store.shards.describe(shards) == before
        for number, size in shards.items():
            assert (await read(store, number))[:size] == content(size, size)
        assert await put(store, b"new") > 1 << 20 > max(shards)
        await store.persistence.persist(shards, soon())  # as they are already
        assert sum(pages.shards for pages in store.persistence.durable._files.values()) == len(SIZES)


async def test_the_age_of_a_recovered_shard_is_counted_from_its_recovery(tmp_path: Path) -> None:
    """By a clock that does not begin with the process."""
    async with running(tmp_path) as store:
        number = await put(store, content(1, MIB))
        await store.persistence.persist([number], soon())
    settings = {"memory": 32 * MIB, "spill": 0, "spill_dir": tmp_path}
    async with moving(settings, directory=DataDirectory(tmp_path / "data"), clock=lambda: 1e6) as store:
        assert await store.persistence.recover() == [number]
        await read(store, number)
        (held,) = store.statistics().holders
        assert held["bytes"] == MIB
        assert held["oldest_s"] == 0.0


async def test_shards_pinned_for_durable_writes_have_a_readable_holder_name(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        await store.pin(store.persistence, [await put(store, content(1, MIB))], soon())
        (held,) = store.statistics().holders
        assert (held["holder"], held["how"]) == ("writes of durable shards", "pinned")


async def test_durable_shards_need_neither_memory_nor_spill_space(tmp_path: Path) -> None:
    async with running(tmp_path, memory=4 * MIB) as store:
        shards = {}
        for seed in range(12):
            number = await put(store, content(seed, MIB))
            shards[number] = seed
            await store.persistence.persist([number], soon())
        for _ in range(2):
            for number, seed in shards.items():
                assert await read(store, number) == content(seed, MIB)


async def test_a_shard_being_spilled_while_made_durable_leaves_no_durable_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the spill file would take the place of the durable one, whose row nobody would remove."""
    async with running(tmp_path, memory=4 * MIB, spill=16 * MIB) as store:
        persistence, residency = store.persistence, store.residency
        numbers = [await put(store, content(seed, MIB)) for seed in range(3)]
        spill, durably = store.disk.write, False

        async def spill_last(number: int, view: memoryview, forget: Any) -> Any:
            while durably and not persisting.done():
                await asyncio.sleep(0)
            return await spill(number, view, forget)

        async def write(*args: Any, **kwargs: Any) -> Any:
            nonlocal durably
            durably = True
            return await durable(*args, **kwargs)

        durable = persistence.durable.write
        monkeypatch.setattr(store.disk, "write", spill_last)
        monkeypatch.setattr(persistence.durable, "write", write)
        monkeypatch.setattr(residency, "_high", 0)
        monkeypatch.setattr(residency, "_low", 0)
        persisting = asyncio.create_task(persistence.persist(numbers, soon()))
        await asyncio.sleep(0)
        assert persistence._under_way, "its next step is to pin them"
        residency._make_room()
        assert residency._batch
        await persisting
        await asyncio.wait(residency._background._tasks or {persisting})
        assert residency._stored.clean == 3 * MIB
        store.free(numbers)
        await until(lambda: not persistence.durable._files)


async def test_a_deferred_commit_is_performed_for_the_next_waiting_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "LAZY_S", 3600.0)
    async with running(tmp_path) as store:
        durable = store.persistence.durable
        for joins in (False, True):
            commits = durable.journal.commits
            number = await put(store, content(joins, MIB))
            lazy = asyncio.create_task(store.persistence.persist([number], soon(), with_next=True))
            await (asyncio.sleep(0) if joins else lazy)
            assert durable.journal.commits == commits
            await store.persistence.persist([number], soon())
            await lazy
            assert durable.journal.commits == commits + 1
            assert not durable.journal._waiting
        await store.persistence.persist([number], soon())
        assert durable.journal.commits == commits + 1, "nothing was left to commit"


async def test_a_write_that_two_calls_share_fails_neither_for_a_shard_of_the_other(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        kept, freed = await put(store, b"kept"), await put(store, b"freed")
        both = asyncio.create_task(store.persistence.persist([kept, freed], soon()))
        one = asyncio.create_task(store.persistence.persist([kept], soon()))
        store.free([freed])
        with pytest.raises(Freed):
            await both
        await one


async def test_a_read_that_succeeds_again_clears_the_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path, memory=4 * MIB) as store:
        numbers = []
        for seed in range(4):
            numbers.append(await put(store, content(seed, 2 * MIB)))
            await store.persistence.persist(numbers[-1:], soon())
        (seed, away) = next((at, number) for at, number in enumerate(numbers) if store.shards[number].extent is None)
        with monkeypatch.context() as refusing:
            refusing.setattr(files, "read", _refused)
            with pytest.raises(Backpressure, match="Too many open files"):
                await store.pin("r", [away], Deadline.after(0.3))
        assert await read(store, away) == content(seed, 2 * MIB)
        assert not store.disk.error


def _refused(*args: Any) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_freed_shards_give_their_pages_back(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        numbers = [await put(store, content(size, size)) for size in SIZES]
        await store.persistence.persist(numbers, soon())
        (file,) = kept(tmp_path)
        store.free([numbers[-1]])
        await until(lambda: file.stat().st_blocks * 512 <= MIB)
        store.free(numbers[1:3])
    async with running(tmp_path) as store:
        left = [number for number in numbers if number not in (*numbers[1:3], numbers[-1])]
        assert await store.persistence.recover() == left
        for number in left:
            size = SIZES[numbers.index(number)]
            assert (await read(store, number))[:size] == content(size, size)
        store.free(left)
        await until(lambda: not kept(tmp_path))
    async with running(tmp_path) as store:
        assert await store.persistence.recover() == []


@each_case("lost", [Path.unlink, lambda path: os.truncate(path, 0)])
async def test_damaged_durable_shards_are_corrupt_and_others_remain_readable(
    tmp_path: Path, lost: Callable[[Path], None]
) -> None:
    async with running(tmp_path) as store:
        numbers = [await put(store, content(size, size)) for size in SIZES]
        await store.persistence.persist(numbers, soon())
    async with running(tmp_path) as store:
        assert await store.persistence.recover() == numbers
        await store.persistence.persist([await put(store, content(0, MIB))], soon())
    one, other = kept(tmp_path)
    with one.open("r+b") as file:
        file.seek(-MIB, os.SEEK_END)
        file.write(b"wrong")
    lost(other)
    async with running(tmp_path) as store:
        *sound, gone = await store.persistence.recover()
        for number in (sound.pop(), gone):
            with pytest.raises(Corrupt, match=r"\.shards") as refused:
                await read(store, number)
            assert refused.value.shard == number
        for number, size in zip(sound, SIZES, strict=False):
            assert (await read(store, number))[:size] == content(size, size)


async def test_unfinished_durable_files_are_removed_at_recovery(tmp_path: Path) -> None:
    async with running(tmp_path) as store:
        await store.persistence.persist([await put(store, content(0, MIB))], soon())
    folder = tmp_path / "data" / "shards"
    (folder / files.name(99)).write_bytes(bytes(MIB))
    (folder / "notes.txt").write_text("mine")
    async with running(tmp_path) as store:
        assert len(await store.persistence.recover()) == 1
        assert len(kept(tmp_path)) == 2
        number = await put(store, content(1, MIB))
        await store.persistence.persist([number], soon())
        assert len(kept(tmp_path)) == 3


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A data directory on a file system of 6 MiB."""
    with mounted(tmp_path / "data", "-o", "size=6m"):
        yield tmp_path


async def test_a_full_disk_is_backpressure(small: Path) -> None:
    async with running(small) as store:
        fits = await put(store, content(0, 4 * MIB))
        await store.persistence.persist([fits], soon())
        number = await put(store, content(1, 4 * MIB))
        hasty = asyncio.create_task(store.persistence.persist([number], Deadline.after(0.3)))
        patient = asyncio.create_task(store.persistence.persist([number], soon()))
        with pytest.raises(Backpressure) as refused:
            await hasty
        assert "No space left" in refused.value.spill_error
        waiting = asyncio.create_task(store.persistence.persist([number], soon()))
        await asyncio.sleep(0)
        assert not patient.done()
        store.free([fits])
        await asyncio.gather(waiting, patient)
        assert len(kept(small)) == 1
    async with running(small) as store:
        assert await store.persistence.recover() == [number]
        assert await read(store, number) == content(1, 4 * MIB)
