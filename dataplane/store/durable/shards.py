"""The durable shards of a data directory: written in batches, recovered by the index, and freed.

A durable shard has a `DurableShard` as its file: its memory can be taken at once, and its bytes are read back when it
is pinned.

Invariants:

- `write` returns once the bytes and their rows of the index are on disk. With `with_next` it returns once the bytes
  are; the rows are committed with, or before, the next write of the journal. Requests that arrive while a batch is
  being written form the next batch, so that one sync serves all;
- a row of the index is added after its bytes are on disk, and removed before they are. So the bytes of each row are
  complete, unless another program changed them. A file without a row is unfinished or not needed, and the next process
  removes it;
- the next process finds each shard with a row under the same number.

Rejected: an index in the files' own headers, which costs a rename and a second sync of the folder, cannot list the
shards of a lost file, and takes a read of each file to recover (docs/decisions/0053).
"""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import msgspec

from dataplane.background_tasks import BackgroundTasks
from dataplane.errors import Corrupt, DataplaneError
from dataplane.store.durable import files
from dataplane.store.durable.database import CLOSE_S, Journal, checksum
from dataplane.store.durable.directory import NUMBERS, SHARDS, DataDirectory, refused
from dataplane.store.durable.files import FileRange, Pages
from dataplane.store.spill_file import whole_pages
from dataplane.threads import Pool

Args = ParamSpec("Args")
T = TypeVar("T")

_THREADS = 4
_FILE_BYTES = 64 << 20  # the size at which a file gets no further batch: small files are soon freed as a whole


class IndexEntry(msgspec.Struct, frozen=True, gc=False):
    """The index entry of a shard without its location."""

    number: int
    rows: int
    columns: int
    layout: bytes
    holder: str
    size: int


class DurableShard:
    """The location of a durable shard, to be freed with the shard. `indexed`: done once the shard's row is on disk;
    None if the row was on disk from the beginning."""

    __slots__ = ("_shards", "indexed", "number", "place")

    def __init__(
        self, shards: DurableShards, number: int, place: FileRange, indexed: asyncio.Future[None] | None = None
    ) -> None:
        self._shards = shards
        self.number = number
        self.place = place
        self.indexed = indexed

    async def read(self, memory: memoryview) -> None:
        """Fill the memory with the shard's bytes. Raises Corrupt if they changed, OSError if the read fails."""
        directory = self._shards.directory
        try:
            await self._shards.by_thread(files.read, directory.shards, self.place, memory)
        except Corrupt as error:
            path = directory.path / SHARDS / files.name(self.place.file)
            raise Corrupt(f"shard {self.number}: {error}", shard=self.number, path=str(path)) from None

    def free(self) -> None:
        """Remove the shard's row with the next commit, and then its bytes."""
        self._shards.free(self)


@dataclass(slots=True)
class _WriteRequest:
    shards: Sequence[tuple[IndexEntry, memoryview]]
    with_next: bool
    done: asyncio.Future[list[DurableShard]]


class DurableShards:
    """The durable shards of one data directory. Used from one event loop."""

    def __init__(self, directory: DataDirectory) -> None:
        """`directory`: closed with this object. Raises OSError if the system starts no thread."""
        self.directory = directory
        self.journal = Journal(directory.database)
        try:
            self._threads = Pool(_THREADS, "dataplane-durable", storage=True)
        except OSError:
            self.journal.close()
            raise
        self._files: dict[int, Pages] = {}
        self._names = itertools.count(1)
        self._file = self._end = 0  # the current file, and the offset of the next batch; 0: a new file
        self._wanted: list[_WriteRequest] = []
        self._writing = self._closed = False
        self._freed: list[DurableShard] = []
        self._background = BackgroundTasks()

    def by_thread(self, work: Callable[Args, T], *args: Args.args, **kwargs: Args.kwargs) -> asyncio.Future[T]:
        return asyncio.wrap_future(self._threads.submit(work, *args, **kwargs))

    # Writing

    async def write(self, shards: Sequence[tuple[IndexEntry, memoryview]], *, with_next: bool) -> list[DurableShard]:
        """Write the bytes of these shards, which must not change meanwhile. Those of a large shard are whole pages of
        the arena. Returns the shards' locations. `with_next`: return before the rows of the index are on disk.

        Raises Backpressure if the disk has no room for the bytes, DirectoryUnusable or Corrupt if the directory cannot
        be written. Then no shard is stored. While the disk is too full for the index, this waits. Not to be cancelled:
        a thread would go on reading the bytes.
        """
        wanted = _WriteRequest(shards, with_next, asyncio.get_running_loop().create_future())
        self._wanted.append(wanted)
        if not self._writing:
            self._begin()
        return await wanted.done

    def _begin(self) -> None:
        """Write a batch of the requested shards, if there are any."""
        batch: list[_WriteRequest] = []
        nbytes = 0
        for each in self._wanted if self._closed else ():
            each.done.cancel()
        while not self._closed and self._wanted and nbytes < _FILE_BYTES:
            batch.append(self._wanted.pop(0))
            nbytes += sum(len(content) for _, content in batch[-1].shards)
        self._writing = bool(batch)
        if batch:
            self._background.spawn(self._write(batch))

    async def _write(self, batch: Sequence[_WriteRequest]) -> None:
        try:
            with_next = all(each.with_next for each in batch)
            made = iter(await self._written([shard for each in batch for shard in each.shards], with_next))
            for each in batch:
                each.done.set_result(list(itertools.islice(made, len(each.shards))))
        except Exception as error:  # the callers of `write` get the error
            for each in batch:
                if not each.done.done():
                    each.done.set_exception(error)
        finally:
            for each in batch:
                each.done.cancel()  # no effect on a future with a result or an error
            self._begin()

    async def _written(self, shards: Sequence[tuple[IndexEntry, memoryview]], with_next: bool) -> list[DurableShard]:
        contents = [content for _, content in shards]
        fresh = not self._file
        if fresh:
            self._file, self._end = next(self._names), 0
        try:
            where = self.directory.shards, self._file, self._end
            places = await self.by_thread(files.write, *where, contents, fresh)
        except OSError as error:
            self._file = 0
            raise refused(self.directory.path, error) from error
        file, self._end = self._file, whole_pages(places[-1].start + places[-1].size)
        rows = [_row(described, place) for (described, _), place in zip(shards, places, strict=True)]
        indexed = self.journal.write(lambda sql: _insert(sql, rows), lazily=with_next)
        if with_next:
            indexed.add_done_callback(heard)
        else:
            await indexed
        queued = indexed if with_next else None
        pages = self._files.setdefault(file, Pages())
        for place in places:
            pages.add(place)
        if self._end >= _FILE_BYTES:
            self._file = 0
        return [
            DurableShard(self, described.number, place, queued)
            for (described, _), place in zip(shards, places, strict=True)
        ]

    # Freeing

    def free(self, durable: DurableShard) -> None:
        """Remove a shard's row with the next commit, and then its bytes."""
        if self._closed:
            return
        self._freed.append(durable)
        if len(self._freed) == 1:
            self._background.spawn(self._free())

    async def _free(self) -> None:
        """Remove the rows and then the bytes of freed shards. After a failure the next process removes the rest."""
        freed, self._freed = self._freed, []
        numbers = [durable.number for durable in freed]
        with suppress(DataplaneError):
            await self.journal.write(lambda sql: _delete(sql, numbers), lazily=True)
            holes: dict[int, list[tuple[int, int]]] = {}
            for durable in freed:
                hole = self._files[durable.place.file].free(durable.place)
                holes.setdefault(durable.place.file, []).extend([hole] if hole else [])
            for file, ranges in holes.items():
                await self._release(file, ranges)

    async def _release(self, file: int, holes: Sequence[tuple[int, int]]) -> None:
        gone = file in self._files and not self._files[file].shards and not (self._writing and file == self._file)
        if gone:
            del self._files[file]
            if file == self._file:
                self._file = 0
        with suppress(OSError):
            if gone or holes:
                await self.by_thread(files.free, self.directory.shards, file, holes, gone)

    # Recovery

    async def recover(self) -> list[tuple[IndexEntry, DurableShard]]:
        """Return the shards of the index, and remove unknown files and unused pages. To be called before the first
        write. Raises Corrupt if a row was changed."""
        found = await self.by_thread(self.directory.database.read, _select)
        for _, place in found:
            self._files.setdefault(place.file, Pages()).add(place)
        self._names = itertools.count(1 + max(self._files, default=0))
        holes = {file: pages.holes() for file, pages in self._files.items()}
        with suppress(OSError):
            await self.by_thread(files.tidy, self.directory.shards, holes)
        return [(described, DurableShard(self, described.number, place)) for described, place in found]

    def tend(self, last: int) -> None:
        """Reserve shard numbers beyond `last`, the newest one used, if few are left. To be called regularly."""
        if last > self.directory.identity.numbers - NUMBERS // 2:
            self._background.spawn(self._extend(last + NUMBERS))

    async def _extend(self, last: int) -> None:
        with suppress(DataplaneError):
            await self.journal.write(lambda sql: self.directory.more_numbers(sql, last), lazily=True)

    async def aclose(self) -> None:
        """Finish the writes and reads in progress, as far as the disk answers, and stop."""
        await self._background.join(CLOSE_S)
        self.close()
        await self._background.aclose()

    def close(self) -> None:
        """Stop, without waiting for operations in progress. Idempotent."""
        self._closed = True
        self._background.cancel()
        self.journal.close()
        self._threads.shutdown(cancel_futures=True, patience_s=CLOSE_S)
        self.directory.close()


Row = tuple[int, int, int, int, int, int, int, bytes, str, bytes]


def heard(written: asyncio.Future[None]) -> None:
    """Mark the error of a write as retrieved, because its caller may have gone, or the next write reports it."""
    if not written.cancelled():
        written.exception()


def _row(described: IndexEntry, place: FileRange) -> Row:
    file, start, stored, sums = place
    number, rows, columns, layout, holder, size = msgspec.structs.astuple(described)
    return number, file, start, stored, size, rows, columns, layout, holder, sums


def _insert(sql: sqlite3.Connection, rows: Iterable[Row]) -> None:
    marks = ", ".join("?" * 11)
    sql.executemany(f"INSERT INTO shards VALUES ({marks})", [(*row, checksum(*row)) for row in rows])


def _delete(sql: sqlite3.Connection, numbers: Iterable[int]) -> None:
    sql.executemany("DELETE FROM shards WHERE number = ?", [(number,) for number in numbers])


def _select(sql: sqlite3.Connection) -> list[tuple[IndexEntry, FileRange]]:
    found = []
    for *row, summed in sql.execute("SELECT * FROM shards ORDER BY number"):
        if checksum(*row) != summed:
            raise Corrupt(f"the index of durable shards is not as it was written at shard {row[0]}")
        number, file, start, stored, size, rows, columns, layout, holder, sums = row
        found.append((IndexEntry(number, rows, columns, layout, holder, size), FileRange(file, start, stored, sums)))
    return found
