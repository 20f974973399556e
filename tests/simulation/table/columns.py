"""Which lives of nodes store columns of the table, and what they keep for its rows."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from dataplane.batch import locations
from dataplane.table.write_effects import decode
from tests.simulation.checker import Violation
from tests.simulation.stream import columns
from tests.simulation.stream.columns import Shard
from tests.simulation.table.model import Cell


class Columns(columns.Columns):
    """See `tests.simulation.stream.columns`. There are no copies, and cells are freed before all of a write is over."""

    cells: Callable[[], set[tuple[str, Cell]]]
    """Those that rows need."""

    def store(self, rng: Random, partition: int) -> tuple[bytes, int, tuple[bytes, ...]]:
        life, shard, copies = super().store(rng, partition)
        for copy in copies:
            del self._needs[copy, partition][life, shard]
        return life, shard, ()

    def _unneeded(self, life: bytes, partition: int, entry: bytes) -> None:
        """No entry frees a cell that a row needs, and none ends a write that has one."""
        ref, whole = decode(entry)
        [shard] = ref.shards()
        rows = next(iter(locations.footprint(ref).values()))[0][1].array().tolist()
        freed = {(column, (*shard, row)) for column in ref.columns for row in rows}
        if needed := freed & self.cells():
            raise Violation(f"1: {life.hex()} frees {needed}, which rows need")
        if whole:
            self._free(life, partition, ref)

    def kept(self) -> set[Shard]:
        """The shards that lives which go on keep, each once."""
        found = self.needed(0)
        if any(count != 1 for of in found.values() for count in of.values()):
            raise Violation(f"1: {found} are kept")
        return {shard for of in found.values() for shard in of}
