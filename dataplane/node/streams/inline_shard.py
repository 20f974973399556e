"""The reference to a shard whose columns arrived in a request."""

from __future__ import annotations

from functools import lru_cache

from dataplane.batch.frame import ColumnPlace
from dataplane.batch.layout import Outline
from dataplane.batch.layout_check import check_layout
from dataplane.batch.ref import BatchRef
from dataplane.errors import ProtocolMismatch
from dataplane.store.inline_put import rounded
from dataplane.wire import messages as m


def stored(node: bytes, columns: m.Inline, shard: int) -> BatchRef:
    """A reference to all of a shard of this node. Raises ProtocolMismatch if the columns are not as the request
    says."""
    laid = check_layout(columns.layout, rounded(len(columns.payload)))
    named = _named(laid.outline)
    if len(columns.nbytes) != len(named) or min(columns.nbytes) < 0 or not laid.rows:
        raise ProtocolMismatch(f"{laid.rows} rows of {len(named)} columns, and the bytes of {len(columns.nbytes)}")
    return BatchRef.whole(node, laid.rows, named, columns.nbytes, shard)


@lru_cache(maxsize=256)
def _named(outline: Outline) -> dict[str, ColumnPlace]:
    """The columns of a shard with this outline, for a reference to all of it."""
    return {name: ColumnPlace(form.field.declared, 0, slot) for slot, (name, form) in enumerate(outline.columns)}
