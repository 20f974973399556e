"""The disk behind the arena: one file a shard, written and read past the page cache, checked on the way back.

The checksums of each file are in memory, so a changed byte, a file cut short and a file replaced by another all
read as `Corrupt` (`spill_file`).

Invariants:

- `used` is the bytes of all files that exist or are being written. A file counts until the system has deleted it.
  Deletions are retried, and nothing waits for them. Callers check `fits` first, so `used` stays within `quota`, and
  within `room` unless other programs take the disk's space;
- a failed write leaves no file and no counted bytes, or a file that is deleted as soon as possible; a read that raises
  has served no bytes;
- a file has a name of its own among those that exist: a shard may be written again while its last file waits to be
  deleted;
- the event loop makes no call that may wait for the disk: threads make them. A call that hangs costs a thread until it
  returns, and `error` counts it; closing waits for a hanging call for a bounded time.

Files are not synced: spill is capacity, not durability. The directory is a `DirectoryClaim`: a dead node's files are
removed by the next node that starts there.

A file's chunks are hashed and written by two threads, so that hashing one overlaps the writing of another. Files
are opened with O_DIRECT if the file system supports it, which needs no copy and leaves the page cache alone (3.6 GB/s
measured, where buffered writes with fdatasync gave 0.5). LZ4 costs more than a good disk, so it is used only on a disk
slower than LZ4 itself, and only for shards whose first bytes shrink; both speeds are measured while files are
written.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, TypeVar

import lz4.block

from dataplane.config import PAGE, SPILL_REMEDY
from dataplane.errors import Corrupt
from dataplane.store.directory_claim import DirectoryClaim
from dataplane.store.spill_file import (
    CHUNK,
    Forget,
    SpillFile,
    aligned,
    checksum,
    corrupt,
    create,
    open_written,
    pwrite,
    read_chunk,
    whole_pages,
)
from dataplane.threads import Pool, stopped, together

log = logging.getLogger(__name__)

Args = ParamSpec("Args")
T = TypeVar("T")

_MEDIUM = (errno.EIO, errno.EBADMSG, errno.ENODATA, errno.EUCLEAN, errno.ESTALE)
"""The errors of a read after which the file may be lost; other errors say nothing about the file."""
_TRIES, _TRIES_S = 3, 2.0  # failed reads, and the time over which they failed, after which a file counts as lost
_THREADS, _PER_FILE = 3, 2  # of the pool, and the most for one file: a file that hangs leaves a thread for others
_LATE_S = 1.0  # seconds after which a call that has not been answered is an error
_RETRY_S = 0.5  # seconds between attempts to delete a file
_CLOSE_S = 1.5  # seconds that closing waits for hanging calls
_SAMPLE = 64 << 10
_WORTH = 0.7  # compress only shards that shrink below this part of their size


@dataclass(frozen=True, slots=True)
class DiskStatistics:
    """In bytes, except the count `files`. `error`: of operations that fail now, or of calls that hang; else empty."""

    quota: int
    used: int
    files: int
    written: int
    read: int
    error: str


class Disk:
    """A node's spill files. Methods are called from one event loop. Threads of the disk make the system calls."""

    def __init__(self, directory: Path, quota: int, *, compression: str = "auto") -> None:
        """`quota`: the most bytes of the files; 0: spilling is off. `compression`: "auto", "never" or "always". Raises
        OSError with advice if no directory can be created in `directory`, or no thread started."""
        self.quota = quota
        self.room = quota
        """The bytes of files that fit on the disk by its free space when that was last measured; at most `quota`."""
        self.short = False
        """Whether the free space, and not the quota, prevents the next write."""
        self.used = 0
        self.removed: Callable[[], None] = lambda: None
        """Called when files have been deleted and the quota has room for others."""
        self._errors: dict[str, str] = {}  # by operation: its last error
        self._claim = DirectoryClaim(directory, "dataplane-spill", remedy=SPILL_REMEDY) if quota else None
        self._compression = compression
        self._calls: dict[int, float] = {}  # by thread that uses the disk: the start of its call or last chunk
        self._writing_bytes = 0  # the part of `used` that is being written
        self._doomed: deque[SpillFile] = deque()
        self._doomed_bytes = 0
        self._dropped_bytes = 0  # of all files that were ever to be deleted
        self._doomed_paths: set[Path] = set()
        self._removing = False
        self._closed = False
        self._unread: dict[int, tuple[int, float]] = {}  # by shard: failed reads, and the time of the first
        self._files = 0
        self.timed: Callable[[str, int, int], None] = lambda operation, began, nbytes: None
        """Called for each successful write ("spill") and read ("restore") with its start, in nanoseconds of the
        monotonic clock, and its bytes."""
        self._written = 0
        self._read = 0
        self._write_rate = 0.0  # bytes/s of one thread's writes, smoothed; 0: not measured yet
        self._lz4_rate = 600e6  # bytes/s of one thread's compression, smoothed
        if self._claim is not None:
            with ExitStack() as undo:
                undo.callback(self._claim.release)
                self._pool = Pool(_THREADS, "dataplane-spill", storage=True)
                undo.callback(self._pool.shutdown)
                self._remover = Pool(1, "dataplane-remove", storage=True)
                self.room = min(quota, _free(self._claim.descriptor))
                undo.pop_all()

    @property
    def directory(self) -> Path | None:
        """The directory of the files, or None if spilling is off."""
        return self._claim.path if self._claim else None

    @property
    def error(self) -> str:
        """A message that calls hang, or the error of an operation that failed when it was last tried (spilling, reading
        back or deleting); empty if there is none."""
        late = sum(since < time.monotonic() - _LATE_S for since in list(self._calls.values()))
        if late:
            return f"using the disk failed: {late} requests to it have not been answered ({self.directory})"
        full = f"spilling failed: {os.strerror(errno.ENOSPC)} ({self.directory})" if self.short else ""
        return next(iter(self._errors.values()), full)

    def fits(self, sizes: Iterable[int], *, later: bool = False) -> bool:
        """Whether the disk has room for uncompressed files of these sizes in bytes. `later`: once all removed files
        are deleted."""
        used = self.used - self._doomed_bytes if later else self.used
        return used + sum(sizes) <= self.room

    async def measure(self) -> None:
        """Measure the free space of the disk, and so `room`. Only files that were there all the time are added to it,
        so `room` is not too large. Without an answer, it stays as it is."""
        if self._claim is not None:
            there, before = self.used - self._writing_bytes - self._doomed_bytes, self._dropped_bytes
            with suppress(OSError):
                free = await asyncio.wrap_future(self._submit(self._pool, _free, self._claim.descriptor))
                self.room = min(self.quota, there - (self._dropped_bytes - before) + free)

    async def write(self, shard: int, memory: memoryview, forget: Forget) -> SpillFile:
        """Write the bytes of an extent, which must not change meanwhile, to a new file of the shard. Returns the file.

        Raises OSError, and sets `error`, if the disk refuses. Then the file is deleted, if necessary later.
        Not to be cancelled except by closing the disk: a thread would go on writing.
        """
        if self._claim is None:
            raise OSError(errno.ENOSPC, "spilling is off")
        self._loop = asyncio.get_running_loop()
        reserved = len(memory)
        self.used += reserved
        self._writing_bytes += reserved
        began = time.monotonic_ns()
        path = self._path(self._claim.path, shard)
        try:
            writing = self._submit(self._pool, self._write_file, self._claim.descriptor, shard, path, memory, forget)
            file = await asyncio.wrap_future(writing)
        except _Left as left:
            self.used += left.file.size - reserved
            self._doom(left.file)
            self.refused("spilling", left.error)
            raise left.error from None
        except BaseException as error:
            self.used -= reserved
            if isinstance(error, OSError):
                self.refused("spilling", error)
            raise
        finally:
            self._writing_bytes -= reserved
        self._errors.pop("spilling", None)
        self.used += file.size - reserved
        self._files += 1
        self._written += len(memory)
        self.timed("spill", began, len(memory))
        return file

    def _path(self, directory: Path, shard: int) -> Path:
        """The path of the shard's next file. Its name is the shard's number, with more leading zeros while other
        files of the shard wait to be deleted."""
        names = (directory / f"{shard:0{digits}x}.spill" for digits in itertools.count(16))
        return next(path for path in names if path not in self._doomed_paths)

    def _write_file(self, directory: int, shard: int, path: Path, memory: memoryview, forget: Forget) -> SpillFile:
        packs = self._packs(memory)
        fd = create(directory, path)
        try:
            try:
                # Compressed chunks lie where raw ones would, so that all can be written at once.
                chunks = self._each_chunk(
                    len(memory), lambda start, size: self._put(fd, packs, memory, start, size, forget)
                )
            finally:
                os.close(fd)  # a network file system reports here the writes that failed
            return SpillFile(shard, path, sum(whole_pages(stored) for stored, _ in chunks), tuple(chunks))
        except Exception as error:
            why = OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) if isinstance(error, MemoryError) else error
            left = SpillFile(shard, path, len(memory), ())
            if _unlink(directory, [left])[0] or not isinstance(why, OSError):
                raise why from None
            raise _Left(left, why) from None

    def _each_chunk(self, extent: int, work: Callable[[int, int], T]) -> list[T]:
        """Run `work(start, size)` for each chunk of an extent of so many bytes. Returns the results in order. All calls
        have ended when this returns or raises."""

        def chunk(start: int) -> T:
            if self._closed:
                raise OSError(errno.ESHUTDOWN, "the node stops")
            return self._call(work, start, min(CHUNK, extent - start))

        return together(self._pool, chunk, range(0, extent, CHUNK), helpers=_PER_FILE - 1)

    def _submit(self, pool: Pool, work: Callable[Args, T], *args: Args.args, **kwargs: Args.kwargs) -> Future[T]:
        return pool.submit(self._call, work, *args, **kwargs)

    def _call(self, work: Callable[Args, T], *args: Args.args, **kwargs: Args.kwargs) -> T:
        """Run a call that uses the disk, in the current thread, and record its start for `error`."""
        thread = threading.get_ident()
        within = thread in self._calls
        self._calls[thread] = time.monotonic()
        try:
            return work(*args, **kwargs)
        finally:
            if within:
                self._calls[thread] = time.monotonic()
            else:
                del self._calls[thread]

    def _packs(self, memory: memoryview) -> bool:
        """Whether to compress the chunks of a file."""
        if self._compression == "never":
            return False
        if self._compression == "auto" and not 0 < self._write_rate < self._lz4_rate:
            return False
        sample = memory[:_SAMPLE]
        return len(lz4.block.compress(sample, store_size=False)) < _WORTH * len(sample)

    def _put(
        self, fd: int, packs: bool, memory: memoryview, start: int, size: int, forget: Forget
    ) -> tuple[int, bytes]:
        with memory[start : start + size] as chunk:
            summed = checksum(chunk)
            stored: memoryview = chunk
            length = size
            if packs:
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
        return length, summed

    def refused(self, what: str, error: OSError) -> None:
        self._errors[what] = f"{what} failed: {error.strerror or error} ({self.directory})"

    def answered(self, what: str) -> None:
        """Clear the error of an operation, which has succeeded."""
        self._errors.pop(what, None)

    async def read(self, file: SpillFile, memory: memoryview, forget: Forget) -> None:
        """Read a file into an extent of the same size.

        Raises Corrupt if a byte differs from those written, or if the medium has failed `_TRIES` times over `_TRIES_S`
        seconds: then the bytes count as lost. Raises OSError if the file cannot be read now.
        """
        assert self._claim is not None, "it was written"
        began = time.monotonic_ns()
        try:
            reading = self._submit(self._pool, self._read_file, self._claim.descriptor, file, memory, forget)
            await asyncio.wrap_future(reading)
        except OSError as error:
            self._fail(file, error)
            raise
        self._unread.pop(file.shard, None)
        self._read += len(memory)
        self.timed("restore", began, len(memory))

    def _fail(self, file: SpillFile, error: OSError) -> None:
        """Count a failed read of the file. Raises Corrupt after `_TRIES` failures over at least `_TRIES_S` seconds."""
        if error.errno in _MEDIUM:
            tries, since = self._unread.get(file.shard, (0, time.monotonic()))
            self._unread[file.shard] = (tries + 1, since)
            if tries + 1 >= _TRIES and time.monotonic() - since >= _TRIES_S:
                raise corrupt(file, f"could not be read {tries + 1} times: {error.strerror}") from None

    def _read_file(self, directory: int, file: SpillFile, memory: memoryview, forget: Forget) -> None:
        fd = open_written(directory, file)
        try:
            self._each_chunk(len(memory), lambda start, size: read_chunk(fd, file, memory, start, size, forget))
        finally:
            with suppress(OSError):
                os.close(fd)

    async def open(self, file: SpillFile, extent: int) -> tuple[int, bytes] | None:
        """Open the file of an extent of this size, to be sent. Returns the descriptor, which the caller passes to
        `release`, and the joined checksums of the chunks. The descriptor stays readable after the file is deleted.
        Returns None if the file is compressed or cannot be opened; reading it back reports the reason."""
        assert self._claim is not None, "it was written"
        if file.size < extent:
            return None
        try:
            opening = self._submit(self._pool, open_written, self._claim.descriptor, file, direct=False)
            return await asyncio.wrap_future(opening), b"".join(summed for _, summed in file.chunks)
        except (Corrupt, OSError):
            return None
        except asyncio.CancelledError:
            opening.add_done_callback(_close_opened)
            await stopped([opening], _LATE_S)
            raise

    def release(self, fd: int) -> None:
        """Close a descriptor that `open` returned, in a thread."""
        try:
            self._submit(self._remover, _close, fd)
        except OSError:  # the node stops
            _close(fd)

    def remove(self, file: SpillFile) -> None:
        """Delete the file later, in a thread. Its bytes count until it is deleted."""
        self._files -= 1
        if self._unread.pop(file.shard, None) is not None and not self._unread:
            self.answered("reading back")
        self._doom(file)

    def _doom(self, file: SpillFile) -> None:
        self._doomed.append(file)
        self._doomed_paths.add(file.path)
        self._doomed_bytes += file.size
        self._dropped_bytes += file.size
        if not self._removing and "deleting" not in self._errors:
            self._remove_now()

    def _remove_now(self) -> None:
        """Delete all files that are due. After a failure, delete one file at a time, the next one at each attempt, so
        that a file that cannot be deleted blocks no other."""
        if self._closed or self._claim is None or not self._doomed:
            return
        self._removing = True
        files = [self._doomed[0]] if "deleting" in self._errors else list(self._doomed)
        try:
            deleting = self._submit(self._remover, _unlink, self._claim.descriptor, files)
            removing = asyncio.wrap_future(deleting, loop=self._loop)
        except OSError as error:
            self._removed(0, error)
        else:
            removing.add_done_callback(self._removal_ended)

    def _removal_ended(self, removing: asyncio.Future[tuple[int, OSError | None]]) -> None:
        if not removing.cancelled():  # cancelled when the disk is closed
            error = removing.exception()
            self._removed(*((0, error) if isinstance(error, OSError) else removing.result()))

    def _removed(self, gone: int, error: OSError | None) -> None:
        """The first `gone` of the due files were deleted; the next was not, because of `error`."""
        for _ in range(gone):
            file = self._doomed.popleft()
            self._doomed_paths.discard(file.path)
            self._doomed_bytes -= file.size
            self.used -= file.size
        self._removing = False
        if error is None:
            self._errors.pop("deleting", None)
            self._remove_now()
        else:
            self.refused("deleting", error)
            self._doomed.rotate(-1)
            self._loop.call_later(_RETRY_S, self._remove_now)
        if gone:
            self.removed()

    def statistics(self) -> DiskStatistics:
        return DiskStatistics(self.quota, self.used, self._files, self._written, self._read, self.error)

    def close(self) -> None:
        """Stop the threads and remove the directory with all files. Abandon calls that hang for longer than `_CLOSE_S`;
        the next node that starts there removes the rest. Idempotent."""
        if self._claim is None or self._closed:
            return
        self._closed = True
        self._pool.shutdown(cancel_futures=True, patience_s=_CLOSE_S)
        self._remover.submit(self._claim.release)
        self._remover.shutdown(patience_s=_CLOSE_S / 2)
        if not (self._pool.ended and self._remover.ended):
            log.warning(
                "the disk does not answer; files may stay in %s until another node starts there", self.directory
            )


class _Left(Exception):
    """A write failed, and so did the deletion of its file."""

    def __init__(self, file: SpillFile, error: OSError) -> None:
        super().__init__(file, error)
        self.file = file
        self.error = error


def _unlink(directory: int, files: Iterable[SpillFile]) -> tuple[int, OSError | None]:
    """Delete files one after another. Returns how many are gone, and the error of the next one."""
    gone = 0
    for file in files:
        try:
            os.unlink(file.path.name, dir_fd=directory)
        except (FileNotFoundError, IsADirectoryError):
            pass  # another process has removed the file, or put a directory in its place
        except OSError as error:
            return gone, error
        gone += 1
    return gone, None


def _free(directory: int) -> int:
    """The free bytes of the file system of the directory."""
    system = os.fstatvfs(directory)
    return system.f_bavail * system.f_frsize if system.f_blocks else sys.maxsize  # some tell nothing


def _close_opened(opening: Future[int]) -> None:
    if not opening.cancelled() and not opening.exception():
        os.close(opening.result())


def _close(fd: int) -> None:
    """Close a file, and drop its pages from the page cache, because nothing here reads them."""
    with suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    with suppress(OSError):
        os.close(fd)


def _smooth(old: float, new: float) -> float:
    return new if not old else 0.8 * old + 0.2 * new
