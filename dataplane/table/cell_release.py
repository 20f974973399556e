"""The entries of outboxes that tell nodes which cells of a table no row needs any more.

There are two kinds of entries. When no cell of a write is needed any more, the entry is the encoded reference of the
write; it ends one need of the shards. When only some cells are not needed, and each cell of the write is stored
separately, the entry is a byte with which no reference begins, followed by the reference to these cells; they are freed
at once, and the need of the shards stays. An entry that arrives twice changes nothing the second time.
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
    """The reference in an entry, and whether it is that of a whole write. Raises ProtocolMismatch."""
    cells = entry[:1] == _CELLS
    return BatchRef.decode(entry[1:] if cells else entry), not cells
