"""Which partitions a stream has, and which of them are open to new groups: a value of the coordinator, with a version.

A row with a group or key goes to the open partition of the highest rendezvous hash (`cluster.placement`); one without,
and a group that is appended whole, to the partition of its producer's own node. When a partition is added or closed the
table has a new version, and keeps the set of open partitions that was: a group or key of which the two say different
partitions is asked for at the older first, as long as the older may hold part of it. Then that set is retired.

What always holds: a partition's number is never used again; tables of one stream differ in their versions, and of two
streams of one name in their generations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec
import numpy as np

from dataplane.cluster.placement import Index, Placement
from dataplane.errors import Corrupt, Misuse

MAX_OLDER = 16
"""Sets of open partitions that are kept; no other is made before the oldest is retired."""


class Partition(msgspec.Struct, frozen=True, array_like=True):
    """A partition, by its number. `node`: whose producers' own it is. Closed ones take no new groups."""

    number: int
    node: str
    open: bool = True


class Table(msgspec.Struct, frozen=True, array_like=True):
    """The placement table of one stream."""

    version: int
    stream: str
    generation: str
    settings: bytes
    followers: int
    partitions: tuple[Partition, ...] = ()
    older: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(version, open partitions) of earlier versions that may hold parts of groups which now belong elsewhere."""
    next: int = 0
    lost: tuple[Partition, ...] = ()
    """Those of which every replica has died."""

    def key(self, number: int) -> str:
        """The name of a partition. Raises Misuse where there is none of that number.

        The node is part of it: of two that make a partition of one number at a time each makes its own, and the table
        names one of them."""
        partition = self.find(number)
        if partition is None:
            raise Misuse(f"stream {self.stream!r} has no partition {number}")
        return f"{self.stream}/{self.generation}/{number}-{partition.node}"

    def find(self, number: int) -> Partition | None:
        return next((partition for partition in self.partitions if partition.number == number), None)

    @property
    def open(self) -> tuple[int, ...]:
        """The numbers of the partitions that are open."""
        return tuple(partition.number for partition in self.partitions if partition.open)

    def own(self, node: str) -> int | None:
        """The partition of this node's producers."""
        found = [partition.number for partition in self.partitions if partition.open and partition.node == node]
        return found[0] if found else None

    # Later versions

    def extended(self, nodes: Sequence[str]) -> Table:
        """With an open partition for each of these nodes."""
        added = tuple(Partition(self.next + i, node) for i, node in enumerate(nodes))
        changed = msgspec.structs.replace(self, partitions=self.partitions + added, next=self.next + len(added))
        return self._then(changed)

    def closed(self, number: int) -> Table:
        """With a partition that takes no new groups."""
        partitions = tuple(
            msgspec.structs.replace(each, open=False) if each.number == number else each for each in self.partitions
        )
        return self._then(msgspec.structs.replace(self, partitions=partitions))

    def without(self, number: int) -> Table:
        """Without a closed partition that is empty, and that no older set names alone."""
        partitions = tuple(each for each in self.partitions if each.number != number)
        older = tuple((version, tuple(n for n in numbers if n != number)) for version, numbers in self.older)
        kept = tuple((version, numbers) for version, numbers in older if numbers)
        return msgspec.structs.replace(self, version=self.version + 1, partitions=partitions, older=kept)

    def losing(self, number: int) -> Table:
        """Without a partition of which every replica has died."""
        partition = self.find(number)
        if partition is None:
            return self
        return msgspec.structs.replace(self.closed(number).without(number), lost=(*self.lost, partition))

    def retired(self, version: int) -> Table:
        """Without the sets of open partitions up to this version."""
        older = tuple((each, numbers) for each, numbers in self.older if each > version)
        return msgspec.structs.replace(self, version=self.version + 1, older=older)

    def _then(self, changed: Table) -> Table:
        older = self.older
        if self.open and self.open != changed.open:
            older = (*older, (self.version, self.open))
        if len(older) > MAX_OLDER:
            raise Misuse(f"stream {self.stream!r} has {MAX_OLDER} versions of its placement that are still needed")
        return msgspec.structs.replace(changed, version=self.version + 1, older=older)

    # Placement

    def place(self, groups: Sequence[str | int]) -> Index:
        """The number of the partition of each of these groups or keys, as of this version."""
        return _placed(self.open, self.stream, groups)

    def moved(self, groups: Sequence[str | int], now: Index) -> list[tuple[int, Index, Index]]:
        """The groups that an older version has elsewhere, the oldest version first: (version, positions of the
        groups, numbers of the partitions)."""
        found = []
        for version, numbers in self.older:
            then = _placed(numbers, self.stream, groups)
            differ = np.flatnonzero(then != now)
            if len(differ):
                found.append((version, differ, then[differ]))
        return found


@lru_cache(maxsize=256)
def _placement(numbers: tuple[int, ...]) -> tuple[Placement, Index]:
    placement = Placement([str(number).encode() for number in numbers])
    return placement, np.array([int(node) for node in placement.nodes], np.int64)


def _placed(numbers: tuple[int, ...], stream: str, groups: Sequence[str | int]) -> Index:
    if not numbers:
        raise Misuse(f"stream {stream!r} has no open partition")
    placement, of = _placement(numbers)
    return of[placement.homes(stream, groups)]


def encode(table: Table) -> bytes:
    """The value that the coordinator keeps."""
    return msgspec.msgpack.encode(table)


_decoder = msgspec.msgpack.Decoder(Table)


def decode(value: bytes) -> Table:
    """Raises Corrupt for a value that no node wrote."""
    try:
        return _decoder.decode(value)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"the coordinator's value is no placement table: {error}") from None
