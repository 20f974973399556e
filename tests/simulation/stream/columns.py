"""Which lives of nodes store columns, which of those are over, and what they keep for the rows of partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING

from dataplane.batch.ref import BatchRef
from tests.simulation.checker import Violation

if TYPE_CHECKING:
    from tests.simulation.stream.node import Node

Shard = tuple[bytes, int]


class Columns:
    """Of all partitions. What a durable node stores is there again when it is."""

    def __init__(self, nodes: Sequence[Node], *, durable: bool) -> None:
        self._nodes = nodes
        self._durable = durable
        self._shards = 0
        self._needs: dict[tuple[bytes, int], Counter[Shard]] = {}  # by life and partition, how often a shard is needed
        self._told: dict[tuple[bytes, int], int] = {}
        self.dead: set[bytes] = set()
        self.died: Callable[[bytes], None] = lambda node: None
        """Called with a life that is over."""
        self.freeing: dict[int, Callable[[Shard], None]] = {}
        """By partition, called with a shard that is about to be freed."""

    def life(self, node: Node) -> bytes:
        return b"n%d-%05d" % (node.number, 0 if self._durable else node.life)

    def number(self, name: str) -> int:
        """Of the node whose life has this name."""
        return int(bytes.fromhex(name)[1:2])

    def store(self, rng: Random, partition: int) -> tuple[bytes, int, tuple[bytes, ...]]:
        """Where a column is put that rows of a partition are to need: the node, a shard that nobody had before, and
        other nodes with a copy of it."""
        self._shards += 1
        there = [node for node in self._nodes if node.up] or list(self._nodes)
        node = rng.choice(there)
        copies = [other for other in there if other is not node and rng.random() < 0.3]
        lives = [self.life(each) for each in (node, *copies)]
        for life in lives:
            self._needs.setdefault((life, partition), Counter())[lives[0], self._shards] += 1
        return lives[0], self._shards, tuple(lives[1:])

    def store_beside(self, node: bytes, partition: int) -> int:
        """Another shard of this life of a node, without copies."""
        self._shards += 1
        self._needs.setdefault((node, partition), Counter())[node, self._shards] += 1
        return self._shards

    def forget(self, partition: int, ref: BatchRef, copies: Sequence[bytes]) -> None:
        """No row came to need what this means."""
        for life in (ref.shards()[0][0], *copies):
            self._free(life, partition, ref)

    def settled(self, partition: int, name: str, last: int, entries: Sequence[bytes]) -> None:
        """A leader tells a node that rows need no more what these entries mean, as far as it was not told before."""
        life = bytes.fromhex(name)
        new = last - self._told.get((life, partition), 0)
        if life in self.dead or new <= 0:
            return
        if new > len(entries):
            raise Violation(f"1: {name} is told {len(entries)} entries up to {last}, and lacks {new}")
        self._told[life, partition] = last
        for entry in entries[-new:]:
            self._unneeded(life, partition, entry)

    def _unneeded(self, life: bytes, partition: int, entry: bytes) -> None:
        ref = BatchRef.decode(entry)
        for shard in ref.shards():
            self.freeing[partition](shard)
        self._free(life, partition, ref)

    def _free(self, life: bytes, partition: int, ref: BatchRef) -> None:
        for shard in ref.shards():
            self.release(life, partition, shard)

    def release(self, life: bytes, partition: int, shard: Shard) -> None:
        """A life keeps a shard for a partition once less."""
        needs = self._needs.get((life, partition), Counter())
        needs[shard] -= 1
        if needs[shard] < 0:
            raise Violation(f"1: {life!r} frees {shard} once more than it is needed")
        if not needs[shard]:
            del needs[shard]

    def needed(self, partition: int) -> dict[bytes, dict[Shard, int]]:
        """What lives that go on keep for rows of a partition."""
        return {
            life: dict(of) for (life, at), of in self._needs.items() if at == partition and of and life not in self.dead
        }

    def crashed(self, node: Node) -> None:
        if not self._durable:
            life = self.life(node)
            self.dead.add(life)
            self.died(life)
