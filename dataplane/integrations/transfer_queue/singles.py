"""A put of one row, the small fields of which are laid out at once (`batch.single`), without a column for each.

verl's agent loops put a trajectory as it is done, and mostly nothing else waits then. What is large of it was written
before with another response of its prompt, or the put goes the way of all others.

What always holds: a row lies as `values.columns` would have it lie; whatever is not simple, or not known, is left to
that.
"""

from __future__ import annotations

from typing import Any

from dataplane.batch import tensordicts, tensors
from dataplane.batch.single import Single, laid_out, single
from dataplane.client.tablerows import Rows
from dataplane.integrations.transfer_queue import sharing
from dataplane.integrations.transfer_queue.coalescing import OTHER, Asked, columns_of
from dataplane.integrations.transfer_queue.partition import Partition


def put(partition: Partition, one: Asked) -> tuple[Rows, list[str]] | None:
    """Make it, if it is such a row: what is known of the row then, and which fields the partition has. None where
    nothing was put. Raises SchemaMismatch, and as `Table.put`."""
    if one.kinds is None or len(one.keys) != 1:
        return None
    small: list[tuple[str, Single]] = []
    large = list(one.large)
    kinds = dict(one.kinds)
    for name, (value,) in one.rows.items():  # in the order of others, so that their shards lie alike
        if name in one.large:
            continue
        found = _single(name, kinds[name], value)
        if found is None:
            return None  # neither small nor looked up
        small.append((name, found))
    row = laid_out(small) if small else None
    if row is None:
        return None
    keys = sharing.keys(columns_of([one], large)) if large else {}
    if keys.keys() != set(large):
        return None
    return sharing.with_known(lambda refs: partition.table._put_row(one.keys[0], row, refs, one.tags), keys)


def _single(name: str, kind: str, value: Any) -> Single | None:
    """A field of one row, as the kind that it is of."""
    if kind != OTHER:
        found = single(name, [value] if value.ndim else value[None], as_object=False)
        return None if found is None else found._replace(kind=kind)
    if tensors.is_tensor(value) or tensordicts.is_tensordict(value) or tensordicts.is_non_tensor(value):
        return None
    if type(value) is str:
        found, kind = single(name, [value], as_object=False), "=text"
    elif type(value) is dict and any(map(tensors.is_tensor, value.values())):
        return None
    else:
        found, kind = single(name, [value], as_object=True), "=object"
    return None if found is None else found._replace(kind=kind)
