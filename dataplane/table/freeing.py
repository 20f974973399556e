"""What nodes are told of cells that no row needs any more: an entry of the outbox for each node that stores some.

An entry is the encoded reference that a write brought, once its last cell is over: its shards are needed once less.
Before that, where each cell of the write is stored by itself, it is the reference to those cells, after a byte that no
reference begins with: they are freed at once, and the shards are needed as before. To hear either twice changes
nothing.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from dataplane.batch.ref import BatchRef
from dataplane.replication.outbox import Outboxes
from dataplane.table.written import Over

_CELLS = b"\xc1"


def tell(over: Iterable[Over], outboxes: Outboxes, gone: Container[bytes]) -> None:
    """Put what is to be told into the outboxes of nodes that are not gone."""
    for each in over:
        if each.done:
            outboxes.release(each.written.encode(), each.written.nodes, gone)
        elif each.written.exact:
            ref = each.ref
            outboxes.tell(_CELLS + ref.encode(), (node for node, _ in ref.shards()), gone)


def decode(entry: bytes) -> tuple[BatchRef, bool]:
    """The reference, and whether it is all of a write. Raises ProtocolMismatch for what is no entry."""
    cells = entry[:1] == _CELLS
    return BatchRef.decode(entry[1:] if cells else entry), not cells
