"""The disk behind the arena: one file a shard, written and read past the page cache, checked on the way back.

What a file is, `spillfile` says. The disk keeps the xxh3-128 of its record in memory, so that a byte changed anywhere,
a file cut short and a file replaced by another all read as `Corrupt`.

What always holds: `used` is the sizes of the files that exist, never above `quota`; a write that fails leaves no
file and no bytes counted; a read that raises has served nothing. Files are not synced: spill is capacity, not
durability. The directory is a `Claim`: a dead node's files are removed by the next node that starts there.

Chunks are hashed and written by two threads, so that hashing one overlaps the writing of the other. O_DIRECT where the
file system has it: it needs no copy and leaves the page cache alone (3.6 GB/s measured, where buffered writes with
fdatasync gave 0.5). LZ4 costs more than a good disk, so it is used only on one slower than LZ4 itself, and only for
shards whose first bytes shrink; both speeds are measured as it goes.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import lz4.block
import xxhash

from dataplane.config import PAGE
from dataplane.store.claim import Claim
from dataplane.store.spillfile import (
    CHUNK,
    LZ4,
    RAW,
    Forget,
    Opened,
    SpillFile,
    aligned,
    corrupt,
    open_direct,
    open_raw,
    pwrite,
    read_chunk,
    read_record,
    record,
    record_size,
    whole_pages,
)
from dataplane.threads import stopped

T = TypeVar("T")

_SHORT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # which says nothing about the file
_SAMPLE = 64 << 10
_WORTH = 0.7  # compress only what shrinks below this part of itself


@dataclass(frozen=True, slots=True)
class DiskStatistics:
    """Bytes, but for `files`; `error` is why the last write failed, or empty."""

    quota: int
    used: int
    files: int
    written: int
    read: int
    error: str


class Disk:
    """A node's spill files. Methods are called from one loop; the work is done by the pool."""

    def __init__(self, directory: Path, quota: int, *, compression: str = "auto") -> None:
        self.quota = quota
        self.used = 0
        self.error = ""
        self._claim = Claim(directory, "dataplane-spill") if quota else None
        self._compression = compression
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="dataplane-spill")  # a file each
        self._chunks = ThreadPoolExecutor(2, thread_name_prefix="dataplane-chunk")
        self._files = 0
        self._written = 0
        self._read = 0
        self._write_rate = 0.0  # bytes/s of one thread's writes, smoothed; 0: not measured yet
        self._lz4_rate = 600e6  # bytes/s of one thread's compression, smoothed

    @property
    def directory(self) -> Path | None:
        """Where the files are, or None where spilling is off."""
        return self._claim.path if self._claim else None

    def fits(self, sizes: Iterable[int]) -> bool:
        """Whether the quota has room for extents of these sizes in bytes, a file each, uncompressed."""
        return self.used + sum(size + record_size(size) for size in sizes) <= self.quota

    async def write(self, shard: int, memory: memoryview, forget: Forget) -> SpillFile:
        """Write an extent's bytes. The caller sees to it that nobody changes them meanwhile.

        Raises OSError, and sets `error`, where the disk refuses; nothing is left of the file then. Not to be
        cancelled but by closing the disk: the pool would go on writing.
        """
        if self._claim is None:
            raise OSError(errno.ENOSPC, "spilling is off")
        reserved = len(memory) + record_size(len(memory))
        self.used += reserved
        path = self._claim.path / f"{shard:016x}.spill"
        run = asyncio.get_running_loop().run_in_executor
        try:
            file = await run(self._pool, self._write_file, shard, path, memory, forget)
        except OSError as error:
            self.used -= reserved
            self.refused("spilling", error)
            raise
        self.error = ""
        self.used += file.size - reserved
        self._files += 1
        self._written += len(memory)
        return file

    def _write_file(self, shard: int, path: Path, memory: memoryview, forget: Forget) -> SpillFile:
        codec = self._codec_for(memory)
        fd = open_direct(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            entries = self._each_chunk(
                len(memory), lambda start, size: self._put(fd, codec, memory, start, size, forget)
            )
            written = record(shard, codec, len(memory), entries)
            # Compressed chunks lie where raw ones would, so that all can be written at once; the file is sparse.
            pwrite(fd, memoryview(aligned(written)), len(memory))
        except BaseException:
            with suppress(OSError):
                path.unlink()
            raise
        finally:
            os.close(fd)
        size = sum(whole_pages(stored) for stored, _ in entries) + len(written)
        return SpillFile(shard, path, size, len(written), xxhash.xxh3_128_digest(written))

    def _each_chunk(self, extent: int, work: Callable[[int, int], T]) -> list[T]:
        """Run `work(start, size)` for each chunk; all that started has ended when this returns or raises."""
        starts = range(0, extent, CHUNK)
        if len(starts) == 1:
            return [work(0, extent)]
        futures = [self._chunks.submit(work, start, min(CHUNK, extent - start)) for start in starts]
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.cancel()
        wait(futures)
        return [future.result() for future in sorted(futures, key=Future.cancelled)]

    def _codec_for(self, memory: memoryview) -> int:
        if self._compression == "never":
            return RAW
        if self._compression == "auto" and not 0 < self._write_rate < self._lz4_rate:
            return RAW
        sample = memory[:_SAMPLE]
        return LZ4 if len(lz4.block.compress(sample, store_size=False)) < _WORTH * len(sample) else RAW

    def _put(self, fd: int, codec: int, memory: memoryview, start: int, size: int, forget: Forget) -> tuple[int, int]:
        with memory[start : start + size] as chunk:
            digest = xxhash.xxh3_64_intdigest(chunk)
            stored: memoryview = chunk
            length = size
            if codec == LZ4:
                began = time.perf_counter()
                packed = lz4.block.compress(chunk, store_size=False)
                self._lz4_rate = _smooth(self._lz4_rate, size / (time.perf_counter() - began))
                if len(packed) + PAGE <= size:
                    stored, length = memoryview(aligned(packed)), len(packed)
            began = time.perf_counter()
            pwrite(fd, stored, start)
            if size >= CHUNK:  # smaller writes measure the latency of the disk and not its speed
                self._write_rate = _smooth(self._write_rate, len(stored) / (time.perf_counter() - began))
        forget(start, size)
        return length, digest

    def refused(self, what: str, error: OSError) -> None:
        """Note why the system would not do it."""
        self.error = f"{what} failed: {error.strerror or error} ({self.directory})"

    async def read(self, file: SpillFile, memory: memoryview, forget: Forget) -> None:
        """Read a file into an extent of the same size.

        Raises Corrupt where a single bit differs, OSError where the system is out of what it takes to look.
        """
        run = asyncio.get_running_loop().run_in_executor
        await run(self._pool, self._read_file, file, memory, forget)
        self._read += len(memory)

    def _read_file(self, file: SpillFile, memory: memoryview, forget: Forget) -> None:
        try:
            fd = open_direct(file.path, os.O_RDONLY)
        except OSError as error:
            if error.errno in _SHORT_OF:
                raise
            raise corrupt(file, f"cannot be opened: {error.strerror}") from None
        try:
            codec, entries = read_record(fd, file, len(memory))
            self._each_chunk(
                len(memory),
                lambda start, size: read_chunk(fd, file, codec, entries[start // CHUNK], memory, start, size, forget),
            )
        finally:
            os.close(fd)

    async def open(self, file: SpillFile, extent: int) -> Opened | None:
        """See `spillfile.open_raw`."""
        opening = self._pool.submit(open_raw, file, extent)
        try:
            return await asyncio.wrap_future(opening)
        except asyncio.CancelledError:
            await stopped([opening])
            opened = None if opening.cancelled() else opening.result()
            if opened is not None:
                opened.close()
            raise

    def remove(self, file: SpillFile) -> None:
        """Delete the file and give its bytes back to the quota."""
        self.used -= file.size
        self._files -= 1
        with suppress(FileNotFoundError):
            file.path.unlink()

    def statistics(self) -> DiskStatistics:
        """The disk's figures now."""
        return DiskStatistics(self.quota, self.used, self._files, self._written, self._read, self.error)

    def close(self) -> None:
        """Wait for the pool and remove the directory with all files."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._chunks.shutdown(wait=True)
        if self._claim is not None:
            self._claim.release()


def _smooth(old: float, new: float) -> float:
    return new if not old else 0.8 * old + 0.2 * new
