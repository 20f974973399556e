"""The shards of a node that rows of streams and tables need.

Rows own the columns of their appends and extends. Columns are freed when no row needs them any more. Each append or
extend counts as one *need* of each shard that it refers to. If delivered rows are appended to another stream, or to the
same, the stored columns have two needs, and are freed with the last.

Invariants: a part of a shard that a row needs exists. A part that no row needs is freed at once, unless its shard has
other needs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from dataplane.batch import locations
from dataplane.batch.locations import link_of
from dataplane.batch.ref import BatchRef, ShardKey
from dataplane.batch.rows import RowIndices
from dataplane.errors import LimitExceeded, OwnerDied
from dataplane.store.shards import FreeCause
from dataplane.store.store import Store
from dataplane.stream.column_batch import ColumnBatch
from dataplane.table.write_effects import UnneededCells

_MANY = 1 << 12  # freed parts of a shard that are noted one by one until its last need ends
_MAX_BYTES = 1 << 44  # the bytes that one reference may claim, so that sums of them fit into a message


class NeededShards:
    """The needed shards of one node."""

    def __init__(self, node: bytes, store: Store) -> None:
        self._node = node
        self._store = store
        self.replica: Callable[[ShardKey], int | None] = lambda _: None
        """Returns the local number of the replica of another node's shard, or None (`ShardReplicas.here`)."""
        self.free_lost: Callable[[Sequence[tuple[int, Sequence[int], RowIndices]]], None] = lambda parts: None
        """Called with freed parts of shards that were stored here before this node was restarted, and are lost."""
        self._needed: Counter[ShardKey] = Counter()
        self._whole: set[ShardKey] = set()
        self._spent: defaultdict[ShardKey, list[tuple[tuple[int, ...], RowIndices]]] = defaultdict(list)

    def free_parts(self, parts: Iterable[tuple[int, Sequence[int], RowIndices]]) -> None:
        """Free parts of shards for the client that put them: now, or with the last need if rows need the shard.
        Raises ValueError or IndexError for an invalid part."""
        lost = []
        for shard, columns, rows in parts:
            key, number = (self._node, shard), locations.shard_of(shard)
            if number < self._store.first and number not in self._store.shards:
                lost.append((shard, columns, rows))
                continue
            if self._needed[key] <= 0:
                self._store.free_part(shard, columns, rows, punch=True)
                continue
            if (found := self._store.shards.of(shard)) is not None:
                found.check_part(columns, rows)
            self._note(key, [(tuple(columns), rows)])
        if lost:
            self.free_lost(lost)

    def _note(self, key: ShardKey, parts: Iterable[tuple[tuple[int, ...], RowIndices]]) -> None:
        """Note parts of a shard to be freed with its last need. A part may be noted repeatedly, for example if rows are
        appended again before they are acked."""
        spent = self._spent[key]
        spent.extend(parts)
        if len(spent) > _MANY:
            spent[:] = locations.combined(spent)

    def _attribute(self, number: int, owner: str) -> None:
        """Note the stream or table whose rows need the shard, for statistics. `owner` is empty if there is none."""
        shard = self._store.shards.of(number)
        if shard is not None:
            shard.owner = owner

    def free_replica(self, key: ShardKey, columns: tuple[int, ...], rows: RowIndices | None) -> None:
        """Free a part of a replica that its owner has freed, now or with the last need. `rows`: None for all of the
        replica."""
        number = self.replica(key)
        if number is None:
            return
        if self._needed[key] > 0:
            if rows is None:
                self._whole.add(key)
            else:
                self._note(key, [(columns, rows)])
            return
        del self._needed[key]
        if rows is None:
            self._store.free([number])
        else:
            self._store.free_part(number, columns, rows)

    def relink(self, ref: BatchRef) -> None:
        """After a restart, recreate the links by which `ref` names local shards. Each link is
        removed when nothing needs it any more. Raises Freed, Corrupt."""
        for key in ref.shards():
            number = self.number(key)
            if number is not None and link_of(number):
                self._store.owners.relink(number)
                self._whole.add(key)

    def recovered(self, shards: Mapping[int, ShardKey]) -> None:
        """After a restart, take over the local shards that only rows own, by number, with the key of each. All needs
        must have been added before. Shards without a need are freed now, each other shard with its last need."""
        self._whole.update(shards.values())
        self._free([key for key in shards.values() if not self._needed[key]])

    def keep(self, ref: BatchRef, owner: str) -> None:
        """Add a need of each shard of `ref`, for rows of `owner`, an unreplicated stream or table. Raises Freed,
        Corrupt, LimitExceeded; OwnerDied for a shard of another node."""
        _check_bytes(ref.stored_nbytes)
        for (node, shard), selected in locations.footprint(ref).items():
            if node != self._node:
                raise OwnerDied(
                    f"this was put on node {node.hex()}, which has ended or is on another host: put it again",
                    node=node.hex(),
                )
            for columns, rows in selected:
                self._store.owners.require(shard, columns, rows)
        self.keep_too(ref)
        for _, shard in ref.shards():
            self._attribute(shard, owner)

    def need(self, ref: BatchRef, owner: str) -> tuple[ShardKey, ...]:
        """Add a need of each local shard of `ref`, for rows of a partition. `owner`: the stream or table. Returns the
        keys of the local shards. Raises Freed, Corrupt, LimitExceeded."""
        _check_bytes(ref.stored_nbytes)
        found = []
        for key, selected in locations.footprint(ref).items():
            number = self.number(key)
            if number is not None:
                for columns, rows in selected:
                    self._store.owners.require(number, columns, rows)
                found.append(key)
                self._attribute(number, owner)
        self._needed.update(found)
        return tuple(found)

    def unneed(self, shards: Iterable[ShardKey]) -> None:
        """Subtract a need from each shard. With the last need, free the noted parts of the shard."""
        shards = tuple(shards)
        self._needed.subtract(shards)
        self._free(shards)

    def done(self, ref: BatchRef, shards: Iterable[ShardKey]) -> None:
        """Subtract a need from each of these shards of `ref`, whose rows no longer need them. Parts that `ref` names
        are freed with the last need."""
        shards = tuple(shards)
        self._spend(ref, shards)
        self.unneed(shards)

    def _spend(self, ref: BatchRef, shards: Iterable[ShardKey]) -> None:
        """Note the parts of these shards that `ref` names, to be freed with the last need."""
        footprint = locations.footprint(ref)
        for key in shards:
            if self.number(key) is not None:
                self._note(key, footprint[key])

    def thin(self, ref: BatchRef) -> None:
        """Free cells that no row of a table needs and that share no storage: now if their shard has one need, else with
        the last."""
        for key, selected in locations.footprint(ref).items():
            number = self.number(key)
            if number is not None and self._needed[key] > 1:
                self._note(key, selected)
            elif number is not None:
                for columns, rows in selected:
                    self._store.free_part(number, columns, rows, punch=True)

    def keep_stored(self, shard: int, nbytes: int, owner: str) -> None:
        """Add a need of a whole shard with `nbytes` bytes of values, just stored here, for rows of `owner`. Raises
        LimitExceeded."""
        _check_bytes(nbytes)
        self._needed[self._node, shard] += 1
        self._attribute(shard, owner)

    def keep_too(self, ref: BatchRef) -> None:
        """Add a need of each shard of `ref`."""
        self._needed.update(ref.shards())

    def forget(self, ref: BatchRef) -> None:
        """Subtract a need from each shard of `ref`; see `unneed`."""
        self.unneed(ref.shards())

    def free(self, ref: BatchRef) -> None:
        """Free the columns of an append that no row needs."""
        self.keep_too(ref)
        self.released([ColumnBatch(ref, len(ref))])

    def released(self, batches: Iterable[ColumnBatch], stream: str = "") -> None:
        """Free column batches that no row needs any more. `stream`: the name of the stream whose rows needed them, if
        any."""
        freeings = self._store.shards.freeings
        before, freeings.cause = freeings.cause, FreeCause("stream", stream) if stream else freeings.cause
        try:
            for batch in batches:
                self.done(batch.ref, batch.ref.shards())
        finally:
            freeings.cause = before

    def thinned(self, over: Iterable[UnneededCells]) -> None:
        """Free cells that no row of a local table needs any more."""
        for each in over:
            if not each.done and each.written.exact:
                self.thin(each.ref)
                continue
            self._spend(each.ref, each.ref.shards())
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
                    self._attribute(number, "")

    def unscope(self, ref: BatchRef) -> None:
        """Remove the local shards of `ref` from their scopes: rows keep them now."""
        self._store.shards.unscope(number for node, number in ref.shards() if node == self._node)

    def number(self, key: ShardKey) -> int | None:
        """The local number of a shard, which may be a replica; None if it is not here."""
        return key[1] if key[0] == self._node else self.replica(key)

    def free_scope(self, scope: str) -> None:
        """Free the shards under a scope, now or, if rows need them, with the last need."""
        for number in self._store.shards.under(scope):
            key = (self._node, number)
            if self._needed[key] > 0:
                self._whole.add(key)
                self._store.shards.unscope([number])
            else:
                del self._needed[key]
        self._store.free(self._store.shards.under(scope))

    def free_unhanded(self, numbers: Iterable[int], holder: str) -> None:
        """Free those of these shards that the holder put under no scope and that no row needs."""
        own = [number for number in numbers if self._needed[self._node, number] <= 0]
        self._store.free(number for number in own if self._store.owners.put_by(number) == (holder, ""))


def _check_bytes(nbytes: int) -> None:
    if nbytes > _MAX_BYTES:
        what = "bytes of an append"
        raise LimitExceeded(f"more than {_MAX_BYTES} {what}", what=what, asked=_MAX_BYTES + 1, limit=_MAX_BYTES)
