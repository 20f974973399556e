"""Columns that came in a request: the reference to the shard that they were stored as."""

from __future__ import annotations

from dataplane.batch.alike import one
from dataplane.batch.ref import BatchRef
from dataplane.errors import ProtocolMismatch
from dataplane.store.carried import rounded
from dataplane.wire import messages as m


def stored(node: bytes, columns: m.Inline, shard: int) -> BatchRef:
    """All of a shard of this node's. Raises ProtocolMismatch where what was said with its columns is false."""
    laid = one(columns.layout, rounded(len(columns.payload)))
    named = laid.outline.columns
    if len(columns.nbytes) != len(named) or min(columns.nbytes) < 0 or not laid.rows:
        raise ProtocolMismatch(f"{laid.rows} rows of {len(named)} columns, and the bytes of {len(columns.nbytes)}")
    sizes = zip(named, columns.nbytes, strict=True)
    return BatchRef.of(
        node, laid.rows, [(name, form.field, size, shard, i) for i, ((name, form), size) in enumerate(sizes)]
    )
