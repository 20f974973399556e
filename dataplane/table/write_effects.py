"""The cells of a write to a table, and the cells that are no longer needed.

A cell is one row of one column. The bytes of a write are in shards, perhaps on several nodes; each node frees those
that it stores.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from dataplane.batch import locations
from dataplane.batch.ref import BatchRef
from dataplane.replication.outbox import Outboxes
from dataplane.stream.page import Index


@dataclass(slots=True, eq=False)
class WriteEffect:
    """The cells of one write. `left`: how many of them are still in the table. `exact`: no two cells share storage, so
    each can be freed separately."""

    ref: BatchRef
    left: int
    nbytes: int
    exact: bool

    @property
    def share(self) -> int:
        """The approximate bytes of the cells that are still in the table."""
        return self.nbytes * self.left // (len(self.ref) * len(self.ref.columns))

    @classmethod
    def of(cls, ref: BatchRef) -> WriteEffect:
        """A write of this reference, with all cells in the table."""
        return cls(ref, len(ref) * len(ref.columns), ref.stored_nbytes, locations.are_apart(ref))

    @property
    def nodes(self) -> tuple[bytes, ...]:
        """The nodes that store some of its cells."""
        return tuple(dict.fromkeys(node for node, _ in self.ref.shards()))


class UnneededCells(NamedTuple):
    """Cells that are no longer needed: these columns of these rows of a write. `done`: no cell of the write is needed
    any more."""

    written: WriteEffect
    columns: tuple[str, ...]
    rows: Index
    done: bool

    @property
    def ref(self) -> BatchRef:
        return self.written.ref.select(*self.columns)[self.rows]


# The entries of outboxes that tell nodes which cells of a table no row needs any more.
#
# There are two kinds of entries. When no cell of a write is needed any more, the entry is the encoded reference of the
# write; it ends one need of the shards. When only some cells are not needed, and each cell of the write is stored
# separately, the entry is a byte with which no reference begins, followed by the reference to these cells; they are
# freed at once, and the need of the shards stays. An entry that arrives twice changes nothing the second time.

_CELLS = b"\xc1"


def tell(over: Iterable[UnneededCells], outboxes: Outboxes) -> None:
    """Add entries to the outboxes of the nodes that store these cells."""
    for each in over:
        if each.done:
            outboxes.release(each.written.ref.encode(), each.written.nodes)
        elif each.written.exact:
            ref = each.ref
            outboxes.tell(_CELLS + ref.encode(), (node for node, _ in ref.shards()))


def decode(entry: bytes) -> tuple[BatchRef, bool]:
    """The reference in an entry, and whether it is that of a whole write. Raises ProtocolMismatch."""
    cells = entry[:1] == _CELLS
    return BatchRef.decode(entry[1:] if cells else entry), not cells
