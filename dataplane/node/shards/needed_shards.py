"""The shards of a node that rows of streams and tables need.

Rows own what is appended to them: the columns of an append or extend are freed when no row needs them any more. The
same stored rows may be needed twice, by two streams or one, if what one stream delivers is appended to another; then
they are freed when the last is done with them.

Invariants: a part of a shard that a row needs exists; a part that no row needs is freed at once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from dataplane.batch.ref import BatchRef, ShardKey
from dataplane.batch.rows import Rows
from dataplane.batch.shard_ids import link_of
from dataplane.errors import LimitExceeded, OwnerDied
from dataplane.store.freeings import FreeCause
from dataplane.store.store import Store
from dataplane.stream.column_batch import ColumnBatch
from dataplane.table.write_effects import UnneededCells

_MAX_SPENT = 1 << 12  # parts of a shard that are freed before others of it may be
_MAX_BYTES = 1 << 44  # that one reference may claim: sums of such stay numbers that a message can hold


class NeededShards:
    """The needed shards of one node."""

    def __init__(self, node: bytes, store: Store) -> None:
        self._node = node
        self._store = store
        self.replica: Callable[[ShardKey], int | None] = lambda _: None
        """The number here of another node's shard that is kept here too; see `node.shards.replicas`."""
        self._needed: Counter[ShardKey] = Counter()
        self._whole: set[ShardKey] = set()
        self._spent: defaultdict[ShardKey, list[tuple[tuple[int, ...], Rows]]] = defaultdict(list)

    def free_parts(self, parts: Iterable[tuple[int, Sequence[int], Rows]]) -> None:
        """The client that put these frees them: parts of shards that rows need go with the last need, others now.
        Raises ValueError or IndexError for an invalid part; LimitExceeded."""
        for shard, columns, rows in parts:
            key = self._node, shard
            if self._needed[key] <= 0:
                self._store.free_part(shard, columns, rows, punch=True)
                continue
            self._store.check_part(shard, columns, rows)
            if len(self._spent[key]) >= _MAX_SPENT:
                what = "parts of a shard that are freed while streams need others"
                raise LimitExceeded(f"more than {_MAX_SPENT} {what}", what=what, limit=_MAX_SPENT)
            self._spent[key].append((tuple(columns), rows))

    def free_replica(self, key: ShardKey, columns: tuple[int, ...], rows: Rows | None) -> None:
        """A part of a replica was freed at its owner, or all of it (None): it goes when rows of streams do not need
        it any more."""
        number = self.replica(key)
        if number is None:
            return
        if self._needed[key] > 0:
            if rows is None:
                self._whole.add(key)
            else:
                self._spent[key].append((columns, rows))
            return
        del self._needed[key]
        if rows is None:
            self._store.free([number])
        else:
            self._store.free_part(number, columns, rows)

    def relink(self, ref: BatchRef) -> None:
        """Rows from before a restart need what `ref` refers to: recreate the links by which it names local shards,
        each until its last need. Raises Freed, Corrupt."""
        for key in ref.shards():
            number = self.number(key)
            if number is not None and link_of(number):
                self._store.owners.relink(number)
                self._whole.add(key)

    def recovered(self, shards: Mapping[int, ShardKey]) -> None:
        """These local shards, each with its key, are from before a restart, and the rows that need them are known:
        nobody else owns a part of one. Free what no row needs; the rest goes with the last need."""
        self._whole.update(shards.values())
        self._free([key for key in shards.values() if not self._needed[key]])

    def keep(self, ref: BatchRef, owner: str) -> None:
        """Rows of a stream or table (`owner`) of this node alone are about to need what `ref` refers to. Raises
        Freed, Corrupt; OwnerDied for what another node stored."""
        _check_bytes(ref.stored_nbytes)
        for (node, shard), selected in ref.footprint().items():
            if node != self._node:
                raise OwnerDied(
                    f"this was put on node {node.hex()}, which has ended, or is another host's: put it again",
                    node=node.hex(),
                )
            for columns, rows in selected:
                self._store.owners.require(shard, columns, rows)
        self.keep_too(ref)
        for _, shard in ref.shards():
            self._store.attribute(shard, owner)

    def need(self, ref: BatchRef, owner: str) -> tuple[ShardKey, ...]:
        """The rows of a partition (`owner`: its stream or table), wherever it is led, are about to need what is here
        of `ref`. Returns the keys of those shards. Raises Freed, Corrupt, LimitExceeded."""
        _check_bytes(ref.stored_nbytes)
        found = []
        for key, selected in ref.footprint().items():
            number = self.number(key)
            if number is not None:
                for columns, rows in selected:
                    self._store.owners.require(number, columns, rows)
                found.append(key)
                self._store.attribute(number, owner)
        self._needed.update(found)
        return tuple(found)

    def unneed(self, shards: Iterable[ShardKey]) -> None:
        """Subtract a need from each of these shards. Of those without another need, what was freed before is freed."""
        shards = tuple(shards)
        self._needed.subtract(shards)
        self._free(shards)

    def done(self, ref: BatchRef, shards: Iterable[ShardKey]) -> None:
        """No row of the partition needs what is in these shards of `ref` any more: free it once nobody else needs
        it."""
        shards = tuple(shards)
        footprint = ref.footprint()
        for key in shards:
            if self.number(key) is not None:
                self._spent[key].extend(footprint[key])
        self.unneed(shards)

    def thin(self, ref: BatchRef) -> None:
        """No row of a table needs these cells any more, each of which is stored by itself. They are freed now if
        nobody else needs a part of their shard, else with the last need."""
        for key, selected in ref.footprint().items():
            number = self.number(key)
            if number is not None and self._needed[key] > 1:
                self._spent[key].extend(selected)
            elif number is not None:
                for columns, rows in selected:
                    self._store.free_part(number, columns, rows, punch=True)

    def keep_stored(self, shard: int, nbytes: int, owner: str) -> None:
        """As `keep`, of a whole shard that was stored here just now, with so many bytes of values."""
        _check_bytes(nbytes)
        self._needed[self._node, shard] += 1
        self._store.attribute(shard, owner)

    def keep_too(self, ref: BatchRef) -> None:
        """Add a need of each shard."""
        self._needed.update(ref.shards())

    def forget(self, ref: BatchRef) -> None:
        """Subtract a need of each shard; of those without another need, what was freed before is freed."""
        self._needed.subtract(ref.shards())
        self._free(ref.shards())

    def free(self, ref: BatchRef) -> None:
        """No row came to need what this refers to: free it."""
        self.keep_too(ref)
        self.released([ColumnBatch(ref, len(ref))])

    def released(self, patches: Iterable[ColumnBatch], stream: str = "") -> None:
        """No row, of the stream with this name if it is one's, needs these patches any more."""
        freeings = self._store.freeings
        before, freeings.cause = freeings.cause, FreeCause("stream", stream) if stream else freeings.cause
        try:
            for patch in patches:
                for key, selected in patch.ref.footprint().items():
                    if self.number(key) is not None:
                        self._spent[key].extend(selected)
                self._needed.subtract(patch.ref.shards())
                self._free(patch.ref.shards())
        finally:
            freeings.cause = before

    def thinned(self, over: Iterable[UnneededCells]) -> None:
        """No row of a local table needs these cells any more."""
        for each in over:
            if not each.done and each.written.exact:
                self.thin(each.ref)
                continue
            for key, selected in each.ref.footprint().items():
                if self.number(key) is not None:
                    self._spent[key].extend(selected)
            if each.done:
                self.unneed(each.written.ref.shards())

    def _free(self, shards: Iterable[ShardKey]) -> None:
        for key in shards:
            if self._needed[key] <= 0:
                del self._needed[key]
                spent = self._spent.pop(key, ())
                number = self.number(key)
                if key in self._whole:
                    self._whole.discard(key)
                    self._store.free([number] if number is not None else [])
                if number is not None:
                    for columns, rows in spent:
                        self._store.free_part(number, columns, rows)
                    self._store.attribute(number, "")

    def unscope(self, ref: BatchRef) -> None:
        """What `ref` refers to is under no scope any more: rows of streams keep it."""
        self._store.unscope(number for node, number in ref.shards() if node == self._node)

    def number(self, key: ShardKey) -> int | None:
        """The local number of a shard, which may be a replica; None if it is not here."""
        return key[1] if key[0] == self._node else self.replica(key)

    def free_scope(self, scope: str) -> None:
        """Free what was put under a scope; what rows of streams need of it goes with the last need."""
        for number in self._store.scope(scope):
            key = (self._node, number)
            if self._needed[key] > 0:
                self._whole.add(key)
                self._store.unscope([number])
            else:
                del self._needed[key]
        self._store.free_scope(scope)

    def free_unhanded(self, numbers: Iterable[int], holder: str) -> None:
        """Free those of these shards that this holder put, under no scope, and that no row needs."""
        own = [number for number in numbers if self._needed[self._node, number] <= 0]
        self._store.free(number for number in own if self._store.put_by(number) == (holder, ""))


def _check_bytes(nbytes: int) -> None:
    if nbytes > _MAX_BYTES:
        what = "bytes of an append"
        raise LimitExceeded(f"more than {_MAX_BYTES} {what}", what=what, asked=_MAX_BYTES + 1, limit=_MAX_BYTES)
