"""The shards of this node that partitions need. The partitions may be led by any node.

Before a partition is asked to append or extend, the nodes that store the columns or have copies retain these for the
partition. The partition releases them by its outbox (`partitions.column_releases`) when no row needs them any more.

Invariants: columns that a partition has taken are retained until it releases them or no longer exists. An entry of an
outbox that arrives twice is executed once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

from dataplane.batch import locations
from dataplane.batch.locations import Footprint
from dataplane.batch.ref import BatchRef, ShardKey
from dataplane.errors import DataplaneError
from dataplane.node.partitions.record import owner_of
from dataplane.node.shards.needed_shards import NeededShards
from dataplane.table import write_effects

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Need:
    """A holder's need of the local shards of a reference. `rows`: number of rows that were appended with it."""

    holder: str
    ref: BatchRef
    shards: tuple[ShardKey, ...]
    rows: int = 0

    @cached_property
    def footprint(self) -> Footprint:
        """The cells of the reference, by shard."""
        return locations.footprint(self.ref)


class RetainedShards:
    """The retained shards of one node. A holder is the key of a partition, or any other name, whose user has to call
    `release`."""

    def __init__(self, needed: NeededShards) -> None:
        self._needed = needed
        self._needs: dict[str, dict[frozenset[ShardKey], list[Need]]] = {}
        self._told: dict[str, int] = {}  # by partition: the number of the last entry that was executed

    def retain(self, holder: str, ref: BatchRef, rows: int = 0) -> Need:
        """Retain the local shards of `ref` for a holder. `rows`: number of rows that are appended with them. Raises
        Freed, Corrupt, LimitExceeded."""
        need = Need(holder, ref, self._needed.need(ref, owner_of(holder)), rows)
        if need.shards:
            self._needs.setdefault(holder, {}).setdefault(frozenset(ref.shards()), []).append(need)
        return need

    def release(self, need: Need) -> None:
        """End a need whose columns the holder did not take. Other needs of the shards stay. Idempotent."""
        if self._take(need):
            self._needed.unneed(need.shards)

    def settled(self, partition: str, last: int, entries: Sequence[bytes]) -> None:
        """Execute entries of the partition's outbox: release references, or cells of them (`table.write_effects`), that
        no row of the partition needs. `last`: the number of the last entry. Raises ProtocolMismatch."""
        known = self._told.get(partition, 0)
        if last <= known:
            return
        for entry in entries[max(0, len(entries) - (last - known)) :]:
            ref, whole = write_effects.decode(entry)
            if not whole:
                self._needed.thin(ref)
                continue
            needs = self._find(partition, ref)
            if not needs:
                log.debug("%s releases columns that are not retained here", partition)
            for need in needs:
                if self._take(need):
                    self._needed.done(need.ref, need.shards)
        self._told[partition] = last

    def restored(self, partition: str, refs: Iterable[bytes], last: int) -> None:
        """After a restart, retain the references that rows of the partition needed when `last` was the last entry of
        its outbox. A missing shard is logged, and a later read of it fails."""
        for encoded in refs:
            try:
                ref = BatchRef.decode(encoded)
                self._needed.relink(ref)
                self.retain(partition, ref)
            except DataplaneError as error:
                log.error("%s needs columns that this node has lost: %s", partition, error)
        self._told[partition] = last

    def drop(self, holder: str) -> None:
        """Release everything that a holder needs, since its partition no longer exists. Idempotent."""
        self._told.pop(holder, None)
        for needs in self._needs.pop(holder, {}).values():
            for need in needs:
                self._needed.done(need.ref, need.shards)

    @property
    def holders(self) -> list[str]:
        return list(self._needs)

    def executed(self, partition: str) -> int:
        """The number of the last entry of the partition's outbox that was executed; 0 if none was."""
        return self._told.get(partition, 0)

    def rows(self, holder: str) -> int:
        """Number of rows that producers here appended for this holder and whose columns are retained."""
        return sum(need.rows for needs in self._needs.get(holder, {}).values() for need in needs)

    def _find(self, partition: str, ref: BatchRef) -> list[Need]:
        """The needs that were added for a reference: one, or one for each shard if appends were merged."""
        by_shards, shards = self._needs.get(partition, {}), ref.shards()
        found = by_shards.get(frozenset(shards), ())
        if len(found) == 1:
            return [*found]
        footprint = locations.footprint(ref)
        if found:  # several appends have rows of the same shards
            return [*islice((need for need in found if need.footprint == footprint), 1)]
        several: list[Need] = []
        for shard in shards:
            of_shard = by_shards.get(frozenset((shard,)), [])
            alike = (need for need in of_shard if len(of_shard) == 1 or need.footprint[shard] == footprint[shard])
            several += islice(alike, 1)
        return several

    def _take(self, need: Need) -> bool:
        """Forget the need. Returns whether it was known."""
        needs = self._needs.get(need.holder)
        key = frozenset(need.ref.shards())
        several = () if needs is None else needs.get(key, ())
        if needs is None or need not in several:
            return False
        needs[key].remove(need)
        if not needs[key]:
            del needs[key]
        if not needs:
            del self._needs[need.holder]
        return True
