"""Files of durable shards. A batch of shards is written behind the earlier ones, and synced before the index in the
data directory's database names it. Bytes that the index names are never overwritten.

Each batch begins at a page. Large shards are on whole pages, so that they bypass the page cache between disk and arena.
Small shards (at most `MOST` bytes) are packed. The index has the positions and checksums of shards; a file has no
header. Bytes that the index does not name are unfinished or not needed, and are deleted. A shard whose file is missing
or has other bytes is Corrupt.

Freed shards return the pages that no other shard uses, by punching holes; a file is deleted with its last shard.

Functions here that take a directory's descriptor may wait for the disk, so threads call them. They raise OSError if the
system refuses.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dataplane.batch.layout import aligned as rounded
from dataplane.config import PAGE
from dataplane.errors import Corrupt
from dataplane.store.extents import RangeSet
from dataplane.store.small_extents import MOST
from dataplane.store.spill_file import CHUNK, checksum, create, open_direct, pread, pwrite, whole_pages

RESERVE, RESERVE_SHARE = 64 << 20, 8
"""The bytes of the file system that shards leave free: `RESERVE`, but at most the size divided by `RESERVE_SHARE`. The
database needs them for the commands that make room: its write-ahead log has about 4 MiB, its growth at a checkpoint is
as much, and a snapshot of a partition is written before the former one is deleted."""


class FileRange(NamedTuple):
    """The location of a shard's bytes: `size` of them at `start` of a file. `sums`: the xxh3-64 of each `CHUNK`."""

    file: int
    start: int
    size: int
    sums: bytes


def name(file: int) -> str:
    return f"{file:016x}.shards"


def number(name: str) -> int | None:
    """The number of a file of shards by its name, or None for other files."""
    found = re.fullmatch(r"([0-9a-f]{16})\.shards", name)
    return int(found[1], 16) if found else None


def _placed(file: int, begin: int, contents: Sequence[memoryview]) -> list[FileRange]:
    """The locations and checksums of the shards. A shard of more than `MOST` bytes gets whole pages."""
    places, at = [], begin
    for content in contents:
        size = len(content)
        at = whole_pages(at) if size > MOST else rounded(at)
        places.append(FileRange(file, at, size, sums(content)))
        at += size
    return places


def sums(content: memoryview) -> bytes:
    return b"".join(checksum(content[start : start + CHUNK]) for start in range(0, len(content), CHUNK))


def write(directory: int, file: int, begin: int, contents: Sequence[memoryview], fresh: bool) -> list[FileRange]:
    """Write shards with these bytes into a file at the offset `begin`, a multiple of the page size. `fresh`: create the
    file. Returns the shards' locations once the bytes are on disk. Raises OSError if the system refuses, or if less
    room than the reserve would be left; then the file is cut to its former size, or deleted if fresh. The bytes of
    large shards begin at a page of memory, as O_DIRECT requires."""
    places, path = _placed(file, begin, contents), name(file)
    _require_room(directory, whole_pages(places[-1].start + places[-1].size) - begin)
    fd = create(directory, Path(path)) if fresh else open_direct(directory, path, os.O_WRONLY | os.O_NONBLOCK)
    try:
        try:
            _write(fd, places, contents)
            os.fdatasync(fd)
        except OSError:
            with suppress(OSError):
                os.ftruncate(fd, begin)
            raise
        finally:
            os.close(fd)
        if fresh:
            os.fsync(directory)
    except OSError:
        if fresh:
            with suppress(OSError):
                os.unlink(path, dir_fd=directory)
        raise
    return places


def _require_room(directory: int, nbytes: int) -> None:
    """Raises OSError if writing this many bytes would leave less room than the reserve."""
    system = os.fstatvfs(directory)
    free, reserve = system.f_bavail * system.f_frsize, min(RESERVE, system.f_blocks * system.f_frsize // RESERVE_SHARE)
    if free - nbytes < reserve:
        full = os.strerror(errno.ENOSPC)
        raise OSError(errno.ENOSPC, f"{full}: the last {reserve / (1 << 20):.1f} MiB are reserved for acks")


def _write(fd: int, places: Sequence[FileRange], contents: Sequence[memoryview]) -> None:
    packed, begin = bytearray(), 0  # consecutive small shards, and their page-aligned start in the file

    def flush() -> None:
        if packed:
            buffer = mmap.mmap(-1, whole_pages(len(packed)))
            buffer[: len(packed)] = packed
            pwrite(fd, memoryview(buffer), begin)
            packed.clear()

    for place, content in zip(places, contents, strict=True):
        if place.size > MOST:
            flush()
            pwrite(fd, content, place.start)
            continue
        if not packed:
            begin = place.start // PAGE * PAGE
        packed += bytes(place.start - begin - len(packed))
        packed += content
    flush()


def read(directory: int, place: FileRange, memory: memoryview) -> None:
    """Fill memory, which begins at a page, with a shard's bytes, followed by zeros. Raises Corrupt if the file is
    missing or cut short, or if the bytes differ from those written."""
    path = name(place.file)
    try:
        fd = open_direct(directory, path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        raise _corrupt(place, "is gone") from None
    try:
        if place.size > MOST:
            _read(fd, place, memory[: place.size], place.start)
        else:
            begin = place.start // PAGE * PAGE
            buffer = mmap.mmap(-1, whole_pages(place.start + place.size) - begin)
            _read(fd, place, memoryview(buffer), begin)
            memory[: place.size] = buffer[place.start - begin : place.start - begin + place.size]
    finally:
        os.close(fd)
    memory[place.size :] = bytes(len(memory) - place.size)
    with memory[: place.size] as content:
        if sums(content) != place.sums:
            raise _corrupt(place, "has other bytes than were written")


def _read(fd: int, place: FileRange, memory: memoryview, offset: int) -> None:
    if not pread(fd, memory, offset):
        raise _corrupt(place, "was cut short")


def _corrupt(place: FileRange, what: str) -> Corrupt:
    return Corrupt(f"the file {name(place.file)} of durable shards {what} (from byte {place.start})")


def free(directory: int, file: int, holes: Iterable[tuple[int, int]], gone: bool) -> None:
    """Punch ranges of whole pages of a file, or delete the file if it is `gone`. A missing file is ignored."""
    path = name(file)
    with suppress(FileNotFoundError):
        if gone:
            os.unlink(path, dir_fd=directory)
            return
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        try:
            size = os.fstat(fd).st_size
            if not size:  # another program has truncated the file, and it cannot be mapped
                return
            with mmap.mmap(fd, 0) as mapped:
                for start, end in holes:
                    if start < min(end, size):
                        mapped.madvise(mmap.MADV_REMOVE, start, min(end, whole_pages(size)) - start)
        finally:
            os.close(fd)


def tidy(directory: int, holes: Mapping[int, Sequence[tuple[int, int]]]) -> None:
    """Delete the files of shards that `holes` does not name, and punch the holes of the others."""
    with os.scandir(directory) as found:
        there = [number(entry.name) for entry in found]
    for file in there:
        if file is not None:
            free(directory, file, holes.get(file, ()), file not in holes)


class Pages:
    """The used bytes of one file."""

    def __init__(self) -> None:
        self._live = RangeSet()
        self.shards = 0

    def add(self, place: FileRange) -> None:
        self._live.add(place.start, place.start + place.size)
        self.shards += 1

    def free(self, place: FileRange) -> tuple[int, int] | None:
        """Remove a shard. Returns the range of whole pages around it that no other shard uses, which can be punched."""
        start, end = place.start, place.start + place.size
        self._live.remove(start, end)
        self.shards -= 1
        first, last = start // PAGE * PAGE, whole_pages(end)
        if self._live.covered(first, start):
            first += PAGE
        if self._live.covered(end, last):
            last -= PAGE
        return (first, last) if first < last else None

    def holes(self) -> list[tuple[int, int]]:
        """The unused ranges of whole pages. The last range ends beyond any file."""
        found, at = [], 0
        for start, end in self._live:
            first = start // PAGE * PAGE
            if at < first:
                found.append((at, first))
            at = whole_pages(end)
        return [*found, (at, 1 << 62)]
