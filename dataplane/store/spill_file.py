"""A spill file: its format, and how it is written, read back, or sent unchanged.

A file is the extent's chunks, each a whole number of pages, then a record: a header, and for each chunk its stored
length and the xxh3-64 of its bytes in memory. The record is written last, so a file without a valid one is unfinished.
An uncompressed chunk lies in the file at the same offset as in the extent.

Invariants: bytes that are read are compared with their checksums, by the reader here or by the receiver: an
`OpenSpillFile` has the sums of its chunks. Files are named relative to the directory's descriptor, and
opened without following a link and without blocking; only the regular file that was written there is read. A pipe, a
device or a socket in its place could block the reader forever.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import lz4.block
import xxhash

from dataplane.config import PAGE, format_size
from dataplane.errors import Corrupt

CHUNK = 4 << 20
"""The bytes of an extent that are hashed, compressed, written and read together."""

_HEADER = struct.Struct("<8sIIQQQ")  # magic, version, codec, shard, extent bytes, chunks
_ENTRY = struct.Struct("<QQ")  # stored bytes, xxh3-64 of the chunk in memory
_MAGIC = b"DPSPILL\0"
_VERSION = 1
_GONE = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ENODEV)
"""Errors of opening a file that was removed, or replaced by a link, a directory, a socket or a device."""
RAW, LZ4 = 0, 1

Forget = Callable[[int, int], None]
"""Called from a thread of the pool when the bytes (start, size) of the extent have been processed."""


@dataclass(frozen=True, slots=True)
class SpillFile:
    """A finished file: its path, its size on disk in bytes, and the xxh3-128 of its record. `identity`: the file
    system's number for it, from `identify`."""

    shard: int
    path: Path
    size: int
    record_size: int
    digest: bytes
    identity: tuple[int, int]


def record_size(extent: int) -> int:
    return whole_pages(_HEADER.size + _ENTRY.size * -(-extent // CHUNK))


def record(shard: int, codec: int, extent: int, entries: list[tuple[int, int]]) -> bytes:
    header = _HEADER.pack(_MAGIC, _VERSION, codec, shard, extent, len(entries))
    return (header + b"".join(_ENTRY.pack(*entry) for entry in entries)).ljust(record_size(extent), b"\0")


def read_record(fd: int, file: SpillFile, extent: int) -> tuple[int, list[tuple[int, int]]]:
    buffer = mmap.mmap(-1, file.record_size)
    _pread(fd, file, memoryview(buffer), extent)
    record = buffer[:]
    if xxhash.xxh3_128_digest(record) != file.digest:
        raise corrupt(file, "its record is not the one that was written")
    _, _, codec, _, _, chunks = _HEADER.unpack_from(record)
    return codec, [_ENTRY.unpack_from(record, _HEADER.size + i * _ENTRY.size) for i in range(chunks)]


def read_chunk(
    fd: int,
    file: SpillFile,
    codec: int,
    entry: tuple[int, int],
    memory: memoryview,
    start: int,
    size: int,
    forget: Forget,
) -> None:
    stored, digest = entry
    with memory[start : start + size] as chunk:
        if codec == LZ4 and stored < size:
            buffer = mmap.mmap(-1, whole_pages(stored))
            _pread(fd, file, memoryview(buffer), start)
            try:
                chunk[:] = lz4.block.decompress(buffer[:stored], uncompressed_size=size)
            except (lz4.block.LZ4BlockError, ValueError):
                raise corrupt(file, f"its bytes {start} to {start + size} do not decompress") from None
            if any(buffer[stored:]):
                raise corrupt(file, f"its padding after byte {start + stored} is not zero")
        else:
            _pread(fd, file, chunk, start)
        if xxhash.xxh3_64_intdigest(chunk) != digest:
            raise corrupt(file, f"its bytes {start} to {start + size} are not those that were written")
    forget(start, size)


def corrupt(file: SpillFile, what: str) -> Corrupt:
    return Corrupt(
        f"shard {file.shard} was spilled, and its file {what} ({file.path}, {format_size(file.size)})",
        shard=file.shard,
        path=str(file.path),
    )


def identify(fd: int) -> tuple[int, int] | None:
    """The identity of a file on this host while it exists; None if it is no regular file."""
    found = os.fstat(fd)
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else None


def open_direct(directory: int, name: str, flags: int) -> int:
    """The file of that name in the directory, opened past the page cache if its file system supports that. Raises
    OSError, and then leaves no new file."""
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags | os.O_DIRECT, 0o600, dir_fd=directory)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without O_DIRECT
            raise
    if flags & os.O_CREAT:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
    return os.open(name, flags, 0o600, dir_fd=directory)


def create(directory: int, path: Path) -> int:
    """Create a file with that name in the directory, open for writing. Raises OSError; then no file was created."""
    return open_direct(directory, path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def open_written(directory: int, file: SpillFile, *, direct: bool = True) -> int:
    """The file, open for reading. Raises Corrupt if it is missing, OSError if the system does not open it."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        if direct:
            fd = open_direct(directory, file.path.name, flags)
        else:
            fd = os.open(file.path.name, flags, dir_fd=directory)
    except OSError as error:
        if error.errno in _GONE:
            raise corrupt(file, f"cannot be opened: {error.strerror}") from None
        raise
    try:
        if identify(fd) != file.identity:
            raise corrupt(file, "was replaced by something else")
    except BaseException:
        os.close(fd)
        raise
    return fd


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def aligned(data: bytes) -> mmap.mmap:
    """The bytes in memory that O_DIRECT accepts, padded with zeros to whole pages."""
    buffer = mmap.mmap(-1, whole_pages(len(data)))
    buffer[: len(data)] = data
    return buffer


def pwrite(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        written = os.pwrite(fd, data[done:], offset + done)
        if written == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += written


def pread(fd: int, memory: memoryview, offset: int) -> bool:
    """Fill the memory from the file. Returns whether the file had enough bytes."""
    done = 0
    while done < len(memory):
        count = os.preadv(fd, [memory[done:]], offset + done)
        if count == 0:
            return False
        done += count
    return True


def _pread(fd: int, file: SpillFile, memory: memoryview, offset: int) -> None:
    if not pread(fd, memory, offset):
        raise corrupt(file, "was cut short")


def _now(work: Callable[[], None]) -> None:
    work()


@dataclass(frozen=True, slots=True)
class OpenSpillFile:
    """A file that is open for reading, and that its owner must close. Its first bytes are those of the extent. `sums`:
    the xxh3-64 of each `CHUNK` of them, 8 bytes each, little-endian. It can still be read after it was deleted. `by`
    runs calls that may wait for the disk."""

    fd: int
    sums: bytes
    by: Callable[[Callable[[], None]], None] = _now

    def close(self) -> None:
        """Close it, and drop its pages from the page cache, because nothing here reads them."""
        self.by(self._close)

    def _close(self) -> None:
        with suppress(OSError):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        with suppress(OSError):
            os.close(self.fd)


def open_raw(directory: int, file: SpillFile, extent: int) -> OpenSpillFile | None:
    """The opened file of an extent of this size; None if its bytes differ from those in memory (compressed), or it
    cannot be read: reading it back reports why."""
    try:
        fd = open_written(directory, file, direct=False)
    except (Corrupt, OSError):
        return None
    try:
        codec, entries = read_record(fd, file, extent)
        if codec == RAW:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            return OpenSpillFile(fd, b"".join(digest.to_bytes(8, "little") for _, digest in entries))
    except (Corrupt, OSError):
        pass
    os.close(fd)
    return None
