"""What nodes are told about cells that no row needs any more: outbox entries.

When the last cell of a write is over, the entry is the encoded reference of the write: its shards are needed once
less. Before that, if each cell of the write is stored by itself, it is the reference to those cells after a byte
with which no reference begins: they are freed at once, and the shards are needed as before. A repeated entry changes
nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from dataplane.batch.ref import BatchRef
from dataplane.replication.outbox import Outboxes
from dataplane.table.write_effects import UnneededCells

_CELLS = b"\xc1"


def tell(over: Iterable[UnneededCells], outboxes: Outboxes, gone: Container[bytes]) -> None:
    """Add entries to the outboxes of nodes that are not gone."""
    for each in over:
        if each.done:
            outboxes.release(each.written.encode(), each.written.nodes, gone)
        elif each.written.exact:
            ref = each.ref
            outboxes.tell(_CELLS + ref.encode(), (node for node, _ in ref.shards()), gone)


def decode(entry: bytes) -> tuple[BatchRef, bool]:
    """The reference, and whether it is all of a write. Raises ProtocolMismatch."""
    cells = entry[:1] == _CELLS
    return BatchRef.decode(entry[1:] if cells else entry), not cells
