"""Decodes and encodes the parts of shards to retain, for messages."""

from __future__ import annotations

from collections.abc import Sequence

from dataplane.batch.rows import RowIndices
from dataplane.errors import ProtocolMismatch
from dataplane.store.links import Selected
from dataplane.wire.shard_messages import Selection


def links_of(shards: Sequence[tuple[int, Selection]]) -> list[tuple[int, Selected]]:
    """For each shard the rows of columns for a link. Raises ProtocolMismatch if there are none."""
    if not shards or not all(selection for _, selection in shards):
        raise ProtocolMismatch("a link to no rows of a shard")
    try:
        return [
            (shard, [(columns, RowIndices.decode(rows)) for columns, rows in selection]) for shard, selection in shards
        ]
    except ValueError as error:
        raise ProtocolMismatch(f"no rows of a shard: {error}") from None


def selection_of(selected: Selected) -> Selection:
    """The encoded selection, for a message."""
    return [(list(columns), rows.encode()) for columns, rows in selected]
