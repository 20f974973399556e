"""Writes shards of a store to its data directory (`store.durable`), and recovers them from there.

A durable shard is clean: its memory can be taken, and its bytes are read back when it is pinned. Invariants: a shard is
pinned until its write has ended, even if the caller gives up; a shard that was freed meanwhile leaves nothing on disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Sequence

from dataplane.batch.locations import shard_of
from dataplane.clock import Deadline
from dataplane.errors import Backpressure, DataplaneError, Misuse
from dataplane.store.arena import Arena
from dataplane.store.durable.directory import DataDirectory
from dataplane.store.durable.shards import DurableShard, DurableShards, IndexEntry, heard
from dataplane.store.residency import Residency
from dataplane.store.shard import Shard
from dataplane.store.shards import Shards

RETRY_S = 0.25  # seconds between attempts to write to a full disk

Pin = Callable[[Hashable, Sequence[int], Deadline], Awaitable[object]]
Unpin = Callable[[Hashable, Iterable[int]], None]


class Persistence:
    """The durable shards of one store."""

    def __init__(
        self,
        directory: DataDirectory,
        arena: Arena,
        residency: Residency,
        shards: Shards,
        numbers: Iterator[int],
        pin: Pin,
        unpin: Unpin,
    ) -> None:
        """`directory`: closed with this object. `numbers`: the numbers of the next shards. Raises OSError if the system
        starts no thread."""
        self.durable = DurableShards(directory)
        self._arena = arena
        self._residency = residency
        self._shards = shards
        self._numbers = numbers
        self._pin = pin
        self._unpin = unpin
        self._under_way: dict[int, asyncio.Task[None]] = {}
        self._full: Backpressure | None = None  # the error of the last write, if the disk was full

    def __str__(self) -> str:
        return "writes of durable shards"

    async def persist(self, numbers: Iterable[int], deadline: Deadline, *, with_next: bool = False) -> None:
        """Return once these shards are durable: the next process on the directory finds them under the same numbers,
        unless they were freed. The number of a link stands for its shard. Concurrent calls share a sync. `with_next`:
        return once the bytes are on disk; the index entries are committed with, or before, the next write of the
        directory's journal. So a command that names the shards needs no second sync.

        Raises Freed for a shard that is gone, its `damage` for an unreadable one, LimitExceeded if all exceed the
        memory budget, Backpressure at the deadline, DirectoryUnusable or Corrupt if the directory cannot be written,
        Misuse for copies of other hosts' shards. After a cancellation or Backpressure the shards may still become
        durable.
        """
        left = dict.fromkeys(map(shard_of, numbers))
        asked = tuple(left)
        while wanted := [number for number in left if not self._is_durable(number)]:
            fresh = [number for number in wanted if number not in self._under_way]
            if fresh:
                task = asyncio.create_task(self._persist(fresh, deadline, with_next))
                task.add_done_callback(heard)
                self._under_way |= dict.fromkeys(fresh, task)
            tasks = {number: self._under_way[number] for number in wanted}
            _, late = await asyncio.wait(set(tasks.values()), timeout=deadline.remaining_s)
            if late:
                raise self._refusal(deadline)
            for number in wanted:
                try:
                    tasks[number].result()
                    del left[number]
                except DataplaneError:
                    if number in fresh:  # else another caller's deadline was over, or another of its shards was freed
                        raise
        if not with_next:
            await self._commit(asked, deadline)

    async def _commit(self, numbers: Iterable[int], deadline: Deadline) -> None:
        """Wait until the index entries of these shards are on disk, because another call may have deferred them to the
        next commit. Raises Backpressure at the deadline."""
        files = [shard.file for shard in map(self._shards.get, numbers) if shard is not None]
        rows = {file.indexed for file in files if isinstance(file, DurableShard) and file.indexed is not None}
        if not rows:
            return
        if not all(row.done() for row in rows):
            rows.add(self.durable.journal.write(lambda sql: None))  # commits are in order
        done, late = await asyncio.wait(rows, timeout=deadline.remaining_s)
        for row in done:
            row.result()
        if late:
            raise self._refusal(deadline)

    def _is_durable(self, number: int) -> bool:
        shard = self._shards.get(number)
        return shard is not None and isinstance(shard.file, DurableShard)

    def _refusal(self, deadline: Deadline) -> Backpressure:
        refusal = self.durable.journal.refusal or self._full
        if refusal is not None:
            return Backpressure(str(refusal), waited_s=deadline.waited_s, spill_error=refusal.spill_error)
        path = self.durable.directory.path
        return Backpressure(f"{path} is slow: not on disk after {deadline.waited_s:.1f} s", waited_s=deadline.waited_s)

    async def _persist(self, numbers: Sequence[int], deadline: Deadline, with_next: bool) -> None:
        try:
            await self._pin(self, numbers, deadline)
            try:
                await self._save(self._shards.find_all(numbers), deadline, with_next)
            finally:
                self._unpin(self, numbers)
        finally:
            for number in numbers:
                del self._under_way[number]

    async def _save(self, shards: Sequence[Shard], deadline: Deadline, with_next: bool) -> None:
        for shard in shards:
            if shard.file is not None and not shard.ours:
                raise Misuse(f"shard {shard.number} is a copy of another host's: it is durable there, or not at all")
            while shard.moving is not None:  # to the spill directory
                await asyncio.wait([shard.moving])
        contents = [self._content(shard) for shard in shards]
        try:
            wanted = list(zip(map(described, shards), contents, strict=True))
            written = await self._write(wanted, deadline, with_next)
        finally:
            for shard, content in zip(shards, contents, strict=True):
                content.release()
                self._residency.was_read(shard)
        for shard, durable in zip(shards, written, strict=True):
            if shard.freed:
                durable.free()
            else:
                self._residency.persisted(shard, durable)

    def _content(self, shard: Shard) -> memoryview:
        assert shard.extent is not None, "it is pinned"
        return memoryview(self._arena.read(shard.extent)) if shard.shared else self._arena.view(shard.extent)

    async def _write(
        self, shards: Sequence[tuple[IndexEntry, memoryview]], deadline: Deadline, with_next: bool
    ) -> list[DurableShard]:
        while True:
            try:
                written = await self.durable.write(shards, with_next=with_next)
                self._full = None
                return written
            except Backpressure as error:
                self._full = error.with_traceback(None)
                if deadline.remaining_s <= RETRY_S:
                    raise
            await asyncio.sleep(RETRY_S)

    async def recover(self) -> list[int]:
        """Add the shards of the data directory that earlier processes of this node stored and did not free. Returns
        their numbers. The caller frees the shards that it does not need, and calls this once, before the first put.
        Raises Corrupt if the index was changed."""
        found = await self.durable.recover()
        for what, durable in found:
            shard = Shard(
                what.number, what.size, what.rows, what.columns, what.layout, what.holder, "", 0, None, durable
            )
            self._shards.add(shard)
        return [what.number for what, _ in found]

    def reserve_numbers(self) -> None:
        """Reserve more shard numbers if few are left, and use one up. To be called regularly."""
        self.durable.tend(next(self._numbers))

    async def aclose(self) -> None:
        """Wait for writes in progress, as far as the disk answers, and release the directory."""
        await self.durable.aclose()
        tasks = set(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Release the directory, without waiting for operations in progress. Idempotent."""
        self.durable.close()


def described(shard: Shard) -> IndexEntry:
    return IndexEntry(shard.number, shard.rows, shard.columns, shard.layout, shard.holder, shard.size)
