"""Outbox entries, by which nodes are told of cells that no row needs any more.

When no cell of a write is needed any more, the entry is the encoded reference of the write: it ends one need of the
shards. Before that, if each cell of the write is stored by itself, the entry is a byte with which no reference begins,
then the reference to the unneeded cells: they are freed at once, and the shards are needed as before. A repeated entry
changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from dataplane.batch.ref import BatchRef
from dataplane.replication.outbox import Outboxes
from dataplane.table.write_effects import UnneededCells

_CELLS = b"\xc1"


def tell(over: Iterable[UnneededCells], outboxes: Outboxes) -> None:
    """Add entries to the outboxes of the nodes that store these cells."""
    for each in over:
        if each.done:
            outboxes.release(each.written.encode(), each.written.nodes)
        elif each.written.exact:
            ref = each.ref
            outboxes.tell(_CELLS + ref.encode(), (node for node, _ in ref.shards()))


def decode(entry: bytes) -> tuple[BatchRef, bool]:
    """The reference, and whether it is of a whole write. Raises ProtocolMismatch."""
    cells = entry[:1] == _CELLS
    return BatchRef.decode(entry[1:] if cells else entry), not cells
