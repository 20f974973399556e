from __future__ import annotations

import asyncio
import errno
import os
import resource
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataplane.config import PAGE
from dataplane.errors import Corrupt
from dataplane.node.shards.reading import _Damaged, _verify_checksums
from dataplane.store.spill import Disk
from dataplane.store.spill_file import CHUNK, SpillFile
from tests.cases import each_case
from tests.mounts import mounted
from tests.processes import until

MIB = 1 << 20


def nothing(_start: int, _size: int) -> None:
    pass


def random_bytes(nbytes: int, seed: int = 0) -> memoryview:
    return aligned(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))


def compressible(nbytes: int) -> memoryview:
    return aligned((np.arange(nbytes) // 64).astype(np.uint8))


def aligned(values: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> memoryview:
    """The bytes where an extent would be: at the start of a page, as O_DIRECT asks."""
    room = np.zeros(len(values) + PAGE, np.uint8)
    start = -room.ctypes.data % PAGE
    room[start : start + len(values)] = values
    return memoryview(room)[start : start + len(values)]  # type: ignore[arg-type]


def blank(nbytes: int) -> memoryview:
    return aligned(np.zeros(nbytes, np.uint8))


def fails(error: BaseException) -> Callable[..., NoReturn]:
    """A function that does nothing but raise."""

    def fail(*_args: object, **_options: object) -> NoReturn:
        raise error

    return fail


def on_disk(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.spill"))


async def deleted(disk: Disk) -> None:
    """Waits until nothing is left of what was removed."""
    await until(lambda: not disk.used)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    made = Disk(tmp_path, 64 * MIB, compression="never")
    yield made
    made.close()


@pytest.fixture
def without_direct(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "ramfs", kind="ramfs") as directory:
        yield directory


SIZES = [PAGE, 3 * PAGE, CHUNK - PAGE, CHUNK, CHUNK + PAGE, 3 * CHUNK]


@each_case("size", SIZES)
@each_case("make", [random_bytes, compressible])
@each_case("compression", ["never", "always", "auto"])
async def test_a_spill_file_round_trips_and_is_deleted(
    tmp_path: Path, size: int, make: Callable[[int], memoryview], compression: str
) -> None:
    disk = Disk(tmp_path, 64 * MIB, compression=compression)
    try:
        data, back = make(size), blank(size)
        file = await disk.write(7, data, nothing)
        assert on_disk(tmp_path) == [file.path]
        assert disk.used == file.size == file.path.stat().st_blocks * 512
        packs = compression == "always" and make is compressible and size > PAGE
        assert (file.size < size) == packs
        await disk.read(file, back, nothing)
        assert back == data
        now = disk.statistics()
        assert (now.files, now.written, now.read, now.error) == (1, size, size, "")
        disk.remove(file)
        await deleted(disk)
        assert (disk.used, disk.statistics().files, on_disk(tmp_path)) == (0, 0, [])
    finally:
        disk.close()
    assert os.listdir(tmp_path) == []


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x40]))


async def refused(disk: Disk, file: SpillFile, size: int) -> Corrupt:
    with pytest.raises(Corrupt) as caught:
        await disk.read(file, blank(size), nothing)
    assert caught.value.fields == {"shard": file.shard, "path": str(file.path)}
    return caught.value


EXTENT = CHUNK + 3 * PAGE


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(offset=st.integers(0, 2 * PAGE - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_is_corrupt(tmp_path: Path, offset: int, bit: int) -> None:
    async def scenario() -> None:
        disk = Disk(tmp_path, MIB, compression="never")
        try:
            file = await disk.write(1, random_bytes(2 * PAGE), nothing)
            damaged = bytearray(file.path.read_bytes())
            damaged[offset] ^= 1 << bit
            file.path.write_bytes(damaged)
            await refused(disk, file, 2 * PAGE)
        finally:
            disk.close()

    asyncio.run(scenario())


@each_case("left", [0, 1, PAGE, EXTENT - 1])
async def test_a_file_cut_short_is_corrupt(disk: Disk, left: int) -> None:
    file = await disk.write(1, random_bytes(EXTENT), nothing)
    os.truncate(file.path, left)
    await refused(disk, file, EXTENT)
    disk.remove(file)
    await deleted(disk)


def endless(path: Path, other: Path) -> None:
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("only root can make a device")


@pytest.mark.parametrize(
    "replace",
    [
        lambda path, _: os.mkfifo(path),
        lambda path, _: path.mkdir(),
        lambda path, other: path.symlink_to(other),
        endless,
    ],
)
async def test_a_file_that_was_replaced_is_corrupt(disk: Disk, replace: Callable[[Path, Path], None]) -> None:
    file, other = [await disk.write(shard, random_bytes(EXTENT, shard), nothing) for shard in (1, 2)]
    file.path.unlink()
    replace(file.path, other.path)
    async with asyncio.timeout(30):
        await refused(disk, file, EXTENT)
        assert not await sent(disk, file, EXTENT)
    assert await sent(disk, other, EXTENT)
    for each in (file, other):
        disk.remove(each)
    await deleted(disk)


async def sent(disk: Disk, file: SpillFile, extent: int) -> bool:
    """Whether who reads the file from another host would take it for what was written."""
    opened = await disk.open(file, extent)
    if opened is None:
        return False  # it is read back first, which says why it can not be
    fd, sums = opened
    try:
        memory = memoryview(bytearray(os.pread(fd, extent, 0)))
        _verify_checksums(memory, [(0, extent)], CHUNK, sums)
    except _Damaged:
        return False
    finally:
        disk.release(fd)
    return True


@each_case("what", ["a chunk of another", "another", "its own chunks, swapped"])
async def test_parts_of_another_file_or_place_are_corrupt(disk: Disk, what: str) -> None:
    extent = 2 * CHUNK
    mine, other = [await disk.write(shard, random_bytes(extent, shard), nothing) for shard in (1, 2)]
    assert await sent(disk, mine, extent)
    ours, theirs = mine.path.read_bytes(), other.path.read_bytes()
    changed = {
        "a chunk of another": ours[:CHUNK] + theirs[CHUNK:],
        "another": theirs,
        "its own chunks, swapped": ours[CHUNK:] + ours[:CHUNK],
    }
    mine.path.write_bytes(changed[what])
    await refused(disk, mine, extent)
    assert not await sent(disk, mine, extent)
    assert await sent(disk, other, extent)
    for file in (mine, other):
        disk.remove(file)
    await deleted(disk)


@each_case("size", [2 * MIB, 2 * CHUNK + PAGE])
async def test_an_unexpectedly_failing_write_returns_its_disk_reservation(
    disk: Disk, tmp_path: Path, size: int
) -> None:
    with pytest.raises(RuntimeError, match="no thread"):
        await disk.write(1, random_bytes(size), fails(RuntimeError("no thread")))
    assert (disk.used, disk.error, on_disk(tmp_path)) == (0, "", [])


@each_case("size", [2 * MIB, 2 * CHUNK + PAGE])
@each_case("compression", ["never", "always"])
async def test_a_spill_that_exceeds_the_file_size_limit_leaves_no_file(
    tmp_path: Path, size: int, compression: str
) -> None:
    """As a full disk: the write fails part of the way, here at a limit of the process."""
    disk = Disk(tmp_path, 64 * MIB, compression=compression)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
        with pytest.raises(OSError, match="File too large"):
            await disk.write(1, random_bytes(size), nothing)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    try:
        assert "File too large" in disk.error
        assert (disk.used, disk.statistics().files, disk.statistics().written, on_disk(tmp_path)) == (0, 0, 0, [])
        await disk.write(1, random_bytes(size), nothing)
        assert disk.error == ""
    finally:
        disk.close()


async def test_a_shard_is_written_again_while_its_last_files_can_not_be_deleted(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 2 * PAGE
    last = random_bytes(size, 3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fails(OSError(errno.EPERM, "no")))
        for seed in (1, 2):
            disk.remove(await disk.write(7, random_bytes(size, seed), nothing))
        file = await disk.write(7, last, nothing)
        assert [int(path.stem, 16) for path in on_disk(tmp_path)] == [7, 7, 7]
        assert disk.used == 3 * file.size
        await until(lambda: "deleting failed" in disk.error)
    await until(lambda: disk.used == file.size)
    assert on_disk(tmp_path) == [file.path]
    back = blank(size)
    await disk.read(file, back, nothing)
    assert back == last
    disk.remove(file)
    await deleted(disk)
    assert (await disk.write(7, last, nothing)).path.stem == f"{7:016x}"


async def test_an_existing_foreign_file_is_never_overwritten(disk: Disk) -> None:
    assert disk.directory is not None
    other = disk.directory / f"{1:016x}.spill"
    other.write_bytes(b"theirs")
    with pytest.raises(FileExistsError):
        await disk.write(1, random_bytes(PAGE), nothing)
    assert other.read_bytes() == b"theirs"
    assert disk.used == 0


@pytest.mark.parametrize("size", [pytest.param(3 * PAGE, marks=pytest.mark.long), 2 * CHUNK + PAGE])
@pytest.mark.parametrize("compression", ["never", "always"])
async def test_spilling_works_on_a_file_system_without_direct_io(
    without_direct: Path, size: int, compression: str
) -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        os.open(without_direct / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    disk = Disk(without_direct, 64 * MIB, compression=compression)
    try:
        data, back = compressible(size), blank(size)
        file = await disk.write(1, data, nothing)
        await disk.read(file, back, nothing)
        assert back == data
        flip(file.path, 10)
        await refused(disk, file, size)
        file.path.unlink()
        await refused(disk, file, size)
        assert not on_disk(without_direct), "a look at what is not there makes nothing"
    finally:
        disk.close()
