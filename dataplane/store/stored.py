"""Counts the bytes that memory and disk hold together, and decides whether new ones leave room to read back the others.

To read a shard back, the store may first have to write other shards from memory to disk: an exchange. So new bytes are
admitted only if the following holds afterwards:

    stored + kept <= memory + disk

`disk` is the room on the disk for spill files (`Disk.room`): the quota, or less if its free space is smaller. `stored`
is the memory in use plus the uncompressed bytes of the shards that are in a spill file only. The spill file of a shard
in memory does not count, because it can be deleted. Memory of durable shards and of copies of other hosts' shards does
not count either, because it needs no spill file. `kept` is the space that one exchange may need: the room of the shard
that is read and of the largest shard that is written, which may be larger than necessary. `kept` never exceeds the
disk, so new bytes are always admitted if `stored` with them fits in memory.

An exchange increases `stored` only by shards that need more room on disk than they free in memory: small ones that
share pages, and shards with holes. `kept` includes this growth, up to a quarter of the disk. Without that limit, a
memory of small shards would leave the disk unused.

Invariant: while the condition holds and `kept` includes all growth, a shard can be read back unless too much is
pinned: enough memory is clean, or the disk has room for the dirty shards that must be written.

Rejected: to let only reads write to the last part of the disk. A read may have to write a larger shard than it gets,
and new bytes then take the difference in memory: after some of these, nothing can be read back any more.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from dataplane.store.shard import Shard
from dataplane.store.spill_file import SpillFile

SPARE = 16  # appends leave the memory, divided by this, free in memory and disk together
_GROWTH = 4  # the disk, divided by this, is the most that is kept for shards that grow on disk


class Rooms:
    """The sizes in memory of shards and reservations, each as often as it occurs."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # occurrences of each size in the heap, 0 included
        self._heap: list[int] = []

    def add(self, room: int) -> None:
        if room not in self._counts:
            self._counts[room] = 0
            heapq.heappush(self._heap, -room)
        self._counts[room] += 1

    def remove(self, room: int) -> None:
        self._counts[room] -= 1

    @property
    def largest(self) -> int:
        """The largest size; 0 if there is none."""
        while self._heap and not self._counts[-self._heap[0]]:
            del self._counts[-heapq.heappop(self._heap)]
        return -self._heap[0] if self._heap else 0


class StoredBytes:
    """The stored bytes of one store. Call `remove` with a shard before each change of its `extent` or `file`, and `add`
    after it."""

    def __init__(
        self, memory: int, disk: Callable[[], int], rooms: Rooms, broken: Callable[[], bool] = lambda: False
    ) -> None:
        """`memory`, `disk()`: their capacities in bytes. `broken()`: whether the disk refuses writes."""
        self.clean = 0
        """Memory of shards that can be taken without writing first."""
        self._memory = memory
        self._disk = disk
        self._rooms = rooms
        self._broken = broken
        self._backed = 0  # the part of `clean` that needs no spill file
        self._spilled = 0  # rooms of the shards that are in a spill file alone
        self._growth = 0  # the disk that shards in memory would take beyond their memory

    def add(self, shard: Shard) -> None:
        self._count(shard, 1)

    def remove(self, shard: Shard) -> None:
        self._count(shard, -1)

    def punched(self, nbytes: int) -> None:
        """Note that a dirty shard has gained a hole of so many bytes."""
        self._growth += nbytes

    def _count(self, shard: Shard, times: int) -> None:
        if shard.extent is None:
            if isinstance(shard.file, SpillFile):
                self._spilled += times * shard.room
            return
        held = times * shard.held
        if shard.file is not None:
            self.clean += held
        if shard.file is None or isinstance(shard.file, SpillFile):
            self._growth += times * shard.room - held
        else:
            self._backed += held

    def admits(self, used: int, nbytes: int, room: int, *, spare: bool) -> bool:
        """Whether `nbytes` new bytes are admitted while `used` bytes of memory are in use. `room`: the bytes of the
        largest shard among the new ones. `spare`: also leave the part for extends (`SPARE`) free in memory and disk
        together; while the disk refuses writes, leave it free or clean in memory."""
        if spare and used - self.clean + nbytes > self._memory - self._memory // SPARE and self._broken():
            return False
        stored, disk = used - self._backed + self._spilled + nbytes, self._disk()
        most_growth, left = disk // _GROWTH, self._memory // SPARE if spare else 0
        largest = min(self._memory, max(room, self._rooms.largest, left))  # a larger one is never read back here
        kept = 2 * largest + min(self._growth, most_growth)
        if spare:
            kept += min(self._growth // SPARE, most_growth)
        return stored + left + min(disk, kept) <= self._memory + disk
