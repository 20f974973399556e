"""The shards of this node that partitions need, wherever these are led.

An append or extend names columns; before a partition is asked to take them, the nodes that store them, or have copies,
retain them for it. The partition says by its outbox (`partitions.columns`) when no row needs them any more.

What always holds: what a partition has taken is retained here until the partition says otherwise, or is gone; an entry
that is told again changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dataplane.batch.ref import BatchRef, ShardKey
from dataplane.errors import DataplaneError
from dataplane.node.shards.needed import NeededShards
from dataplane.table import freeing

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Need:
    """What a holder needs of a reference: the shards of it that are here. `rows`: how many rows it brought."""

    holder: str
    ref: BatchRef
    shards: tuple[ShardKey, ...]
    rows: int = 0


class Retained:
    """All of one node. A holder is a partition, by its key, or anybody else who lets go by itself."""

    def __init__(self, needed: NeededShards) -> None:
        self._needed = needed
        self._needs: dict[str, dict[frozenset[ShardKey], list[Need]]] = {}
        self._told: dict[str, int] = {}  # by partition, the last entry

    def retain(self, holder: str, ref: BatchRef, rows: int = 0) -> Need:
        """Keep what is here of `ref`, which brings so many rows, for this holder. Raises Freed, Corrupt,
        LimitExceeded."""
        need = Need(holder, ref, self._needed.need(ref), rows)
        if need.shards:
            self._needs.setdefault(holder, {}).setdefault(frozenset(ref.shards()), []).append(need)
        return need

    def release(self, need: Need) -> None:
        """The holder does not need it, after all; who else has columns there has them still. Idempotent."""
        if self._take(need):
            self._needed.unneed(need.shards)

    def settled(self, partition: str, last: int, entries: Sequence[bytes]) -> None:
        """A leader tells that no row of its partition needs these references any more, or cells of them
        (`table.freeing`); `last` is the number of the last entry. Raises ProtocolMismatch for what is none."""
        known = self._told.get(partition, 0)
        if last <= known:
            return
        for entry in entries[max(0, len(entries) - (last - known)) :]:
            ref, whole = freeing.decode(entry)
            if not whole:
                self._needed.thin(ref)
                continue
            needs = self._find(partition, ref)
            if not needs:
                log.debug("%s says that it does not need what it has nothing of here", partition)
            for need in needs:
                if self._take(need):
                    self._needed.done(need.ref, need.shards)
        self._told[partition] = last

    def restored(self, partition: str, refs: Iterable[bytes], last: int) -> None:
        """After a restart: what the partition's rows need here, as of the entry `last`. What is not there any more is
        missed by who reads it."""
        for encoded in refs:
            try:
                ref = BatchRef.decode(encoded)
                self._needed.relink(ref)
                self.retain(partition, ref)
            except DataplaneError as error:
                log.error("%s needs what is not here any more: %s", partition, error)
        self._told[partition] = last

    def drop(self, holder: str) -> None:
        """The partition is gone, with all its rows. Idempotent."""
        self._told.pop(holder, None)
        for needs in self._needs.pop(holder, {}).values():
            for need in needs:
                self._needed.done(need.ref, need.shards)

    @property
    def holders(self) -> list[str]:
        """Those that need anything here."""
        return list(self._needs)

    def rows(self, holder: str) -> int:
        """How many rows producers here have brought to this holder whose columns are kept for it."""
        return sum(need.rows for needs in self._needs.get(holder, {}).values() for need in needs)

    def _find(self, partition: str, ref: BatchRef) -> list[Need]:
        """What was retained of a reference that appends have brought: by one, or shard by shard by several that came
        together."""
        by_shards, shards = self._needs.get(partition, {}), ref.shards()
        found = by_shards.get(frozenset(shards), ())
        if len(found) == 1:
            return [*found]
        footprint = ref.footprint()
        if found:  # rows of one shard came by several appends
            return [need for need in found if need.ref.footprint() == footprint][:1]
        several = []
        for shard in shards:
            of_shard = by_shards.get(frozenset((shard,)), [])
            alike = [need for need in of_shard if need.ref.footprint()[shard] == footprint[shard]]
            several += (alike if len(of_shard) > 1 else of_shard)[:1]
        return several

    def _take(self, need: Need) -> bool:
        """Remember it no more; whether it was remembered."""
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
