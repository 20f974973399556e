"""The columns of one append or extend (a column batch), and the nodes that have them.

A column batch is a reference whose rows are rows of the stream. Invariant: `nodes` store its columns, and `spares` have
copies of all of them; a row is lost once one of its columns is on none of these nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from dataplane.batch import locations
from dataplane.batch.ref import BatchRef
from dataplane.replication.outbox import ALL
from dataplane.stream.lease import Leases
from dataplane.stream.page import Flags, Index, counted

Hold: TypeAlias = int | Index
There: TypeAlias = Callable[[bytes, int], bool]
"""Tells whether a shard of a node still exists."""


@dataclass(slots=True, eq=False)
class ColumnBatch:
    """The columns of one append or extend. `left`: the number of rows of the stream, and of readers of replaced
    columns, that need it. `hold`: the delivery number under which the producer held the rows, one for all or one for
    each; -1 for none."""

    ref: BatchRef
    left: int
    hold: Hold = -1
    spares: tuple[bytes, ...] = ()
    nodes: tuple[bytes, ...] = ()
    """The nodes that store its columns. The nodes in `spares` have copies of all of them."""
    pieces: tuple[ColumnBatch, ...] = ()
    """For a row in pieces: the column batches of the pieces. Until the row is finished, `ref` is that of the first."""

    def __post_init__(self) -> None:
        self.nodes = tuple(dict.fromkeys(node for node, _ in self.ref.shards()))

    @classmethod
    def whole(cls, ref: BatchRef, pieces: tuple[ColumnBatch, ...]) -> ColumnBatch:
        """The column batch of a row in pieces. `ref`: the reference that joins them."""
        return cls(ref, 1, pieces=pieces)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.pieces) if self.pieces else self.ref.stored_nbytes

    @property
    def each(self) -> tuple[ColumnBatch, ...]:
        """Its pieces, or itself if it has none."""
        return self.pieces or (self,)

    def _in(self, which: There) -> Flags:
        """The rows of the reference that have some column in one of these shards."""
        flags = np.zeros(len(self.ref), np.bool_)
        for name in self.ref.columns:
            pieces, order = locations.sources(self.ref, name)
            shards = [which(piece.node, locations.shard_of(piece.shard)) for piece in pieces]
            found = np.repeat(shards, [len(piece.rows) for piece in pieces])
            flags |= found if order is None else found[order]
        return flags

    def lives(self, there: There) -> bool:
        """Whether all of its columns still exist. `there` tells whether a shard does."""
        if self.pieces:
            return all(piece.lives(there) for piece in self.pieces)
        stored = all(there(node, locations.shard_of(shard)) for node, shard in self.ref.shards())
        return stored or any(there(spare, ALL) for spare in self.spares)

    def lost(self, there: There, index: Index) -> Flags:
        """Flags of the rows `index` of the reference that have lost a column. To be called if `lives` is false."""
        if self.pieces or len(self.ref) == 1:
            return np.ones(len(index), np.bool_)
        return self._in(lambda node, shard: not there(node, shard))[index]


class ColumnBatches(dict[int, ColumnBatch]):
    """The column batches of a stream, by number. `next`: the number of the next one.

    Invariant: a column batch is returned once, to be freed, when no row and no reader needs it any more.
    """

    def __init__(self, batches: Mapping[int, ColumnBatch] | None = None, following: int = 0) -> None:
        super().__init__(batches or {})
        self.next = following

    def add(self, ref: BatchRef, hold: Hold, spares: Sequence[bytes]) -> int:
        """Add a column batch that all rows of `ref` need. Returns its number."""
        number = self.next
        self.next += 1
        self[number] = ColumnBatch(ref, len(ref), hold, tuple(spares))
        return number

    def release(self, numbers: Index) -> list[ColumnBatch]:
        """Decrement the number of rows that need each of these column batches (-1: none). Returns those that no row
        needs any more."""
        done = []
        for number, count in counted(numbers).items():
            if number >= 0:
                self[number].left -= count
                if not self[number].left:
                    done.append(self.pop(number))
        return done

    def stored(self, first: int = 0) -> Iterator[tuple[int, ColumnBatch]]:
        """The column batches from the number `first` on, ascending, with their numbers. One in pieces is yielded piece
        by piece, with its number."""
        return ((number, each) for number in sorted(self) if number >= first for each in self[number].each)


@dataclass(slots=True, eq=False)
class ReplacedBatch:
    """The numbers of the column batches that one extend replaced. `readers`: the leader's grants that may read them.
    `over`: their removal is decided."""

    batches: Index
    readers: set[int] = field(default_factory=set)
    over: bool = False


class ReplacedBatches:
    """The replaced column batches of a stream. They stay until no grant reads them. Iteration gives their numbers."""

    def __init__(self, batches: Iterable[Index] = ()) -> None:
        self._replaced = [ReplacedBatch(each) for each in batches]

    def __iter__(self) -> Iterator[Index]:
        return (each.batches for each in self._replaced)

    def keep(self, batches: Index, readers: set[int]) -> None:
        self._replaced.append(ReplacedBatch(batches, readers))

    def unread(self, leases: Leases) -> list[ReplacedBatch]:
        """The replaced batches that no grant reads any more, and whose removal is not decided yet."""
        return [
            each
            for each in self._replaced
            if not each.over and all(leases.live(number) is None for number in each.readers)
        ]

    def remove(self, batches: Index) -> bool:
        """Forget these column batches. Returns whether they were kept."""
        same = [each for each in self._replaced if np.array_equal(each.batches, batches)]
        if same:
            self._replaced.remove(next((each for each in same if each.over), same[0]))
        return bool(same)
