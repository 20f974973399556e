"""A spill file: how it is opened, written and read, or sent unchanged.

A file is the extent's chunks. An uncompressed chunk lies in the file at the same offset as in the extent; a compressed
one begins there, and the file is sparse. What is known of a file is in memory alone (`SpillFile`): the stored length of
each chunk, and the xxh3-64 of its bytes in memory.

Invariants: bytes that are read are compared with their checksums, by the reader here or by the receiver. Files are
named relative to the directory's descriptor, and opened without following a link and without blocking; only regular
files are read. A pipe, a device or a socket could block the reader forever.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
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

_GONE = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO, errno.ENODEV)
"""Errors of opening a file that was removed, or replaced by a link, a directory, a socket or a device."""

Forget = Callable[[int, int], None]
"""Called from a thread of the pool when the bytes (start, size) of the extent have been processed."""


@dataclass(frozen=True, slots=True)
class SpillFile:
    """A finished file: its path, its size on disk in bytes, and for each chunk its stored bytes and its `checksum`."""

    shard: int
    path: Path
    size: int
    chunks: tuple[tuple[int, bytes], ...]


def checksum(chunk: memoryview) -> bytes:
    return xxhash.xxh3_64_intdigest(chunk).to_bytes(8, "little")


def read_chunk(fd: int, file: SpillFile, memory: memoryview, start: int, size: int, forget: Forget) -> None:
    stored, summed = file.chunks[start // CHUNK]
    with memory[start : start + size] as chunk:
        if stored < size:
            buffer = mmap.mmap(-1, whole_pages(stored))
            _pread(fd, file, memoryview(buffer), start)
            try:
                chunk[:] = lz4.block.decompress(buffer[:stored], uncompressed_size=size)
            except (lz4.block.LZ4BlockError, ValueError):
                raise corrupt(file, f"its bytes {start} to {start + size} do not decompress") from None
        else:
            _pread(fd, file, chunk, start)
        if checksum(chunk) != summed:
            raise corrupt(file, f"its bytes {start} to {start + size} are not those that were written")
    forget(start, size)


def corrupt(file: SpillFile, what: str) -> Corrupt:
    return Corrupt(
        f"shard {file.shard} was spilled, and its file {what} ({file.path}, {format_size(file.size)})",
        shard=file.shard,
        path=str(file.path),
    )


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
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise corrupt(file, "was replaced by something else")
        if not direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
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
