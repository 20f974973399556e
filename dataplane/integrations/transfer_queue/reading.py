"""Gets: rows of partitions as a TensorDict.

Invariants: all requested rows are returned in their order, or an error names the missing ones. By key, a field that
not all of the rows have is left out with a warning that names the rows, as in TransferQueue: verl's trainer asks for
optional fields. If no field is left, that is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dataplane.batch.concat import concat
from dataplane.batch.ref import BatchRef
from dataplane.errors import Freed, Misuse
from dataplane.integrations.transfer_queue import values
from dataplane.integrations.transfer_queue.errors import NotThere, StorageKeyNotFoundError
from dataplane.integrations.transfer_queue.partition import Partition
from dataplane.integrations.transfer_queue.session import Session
from dataplane.integrations.transfer_queue.writing import gone

if TYPE_CHECKING:
    from transfer_queue.metadata import BatchMeta

log = logging.getLogger(__name__)


def by_key(session: Session, partition: Partition, keys: list[str], fields: list[str] | None) -> Any:
    """The rows with these keys: these fields, or all fields that all of them have. Raises NotThere,
    StorageKeyNotFoundError."""
    try:
        ref = partition.table.read(keys, fields)
    except Misuse as error:
        ref = partition.table.read(keys, _fields(partition, keys, fields, error))
    return _tensordict(session, ref, sorted(ref.columns))


def _fields(partition: Partition, keys: list[str], fields: list[str] | None, error: Misuse) -> list[str]:
    """The fields among these that all rows have. Raises NotThere if keys are missing, or every field is."""
    names = list(partition.table.schema()) if fields is None else list(dict.fromkeys(fields))
    numbers = partition.named(keys)
    have = partition.table.look(numbers, columns=names, tags=False).have
    found = [name for at, name in enumerate(names) if have[:, at].all()]
    for at, name in enumerate(names):
        if fields is not None and have[:, at].any() and name not in found:
            key = keys[int(np.flatnonzero(~have[:, at])[0])]
            log.warning("the field %r of partition %r is left out: %r lacks it", name, partition.name, key)
    if not found:
        wanted = "no field that all of them have" if fields is None else f"none of the fields {', '.join(names)}"
        there = ", ".join(partition.table.schema()) or "none"
        raise NotThere(
            f"these {len(keys)} keys of partition {partition.name!r} have {wanted}: put it first; its fields are"
            f" {there}"
        ) from error
    return found


def by_meta(session: Session, meta: BatchMeta) -> Any:
    """The rows of a BatchMeta, of one partition or several, with all fields that it names. Raises
    StorageKeyNotFoundError if rows were cleared, NotThere if a field was not put."""
    names = meta.field_names
    places: dict[str, list[int]] = {}
    for place, name in enumerate(meta.partition_ids):
        places.setdefault(name, []).append(place)
    refs = [_ref(session.partition(name), [meta.global_indexes[i] for i in at], names) for name, at in places.items()]
    ref = concat(refs)
    if len(refs) > 1:
        ref = ref[np.argsort(np.concatenate([np.array(at) for at in places.values()]))]
    return _tensordict(session, ref, names)


def _ref(partition: Partition, indexes: Sequence[int], names: list[str]) -> BatchRef:
    numbers = partition.numbers(indexes)
    try:
        return partition.table.read(numbers, names)
    except Misuse as error:
        gone(partition, indexes, numbers, error)
        raise NotThere(f"partition {partition.name!r}: {error}") from error


def _tensordict(session: Session, ref: BatchRef, names: Sequence[str]) -> Any:
    try:
        batch = session.plane.get(ref)
    except Freed as error:
        raise StorageKeyNotFoundError(f"rows were cleared while they were read: {error}") from error
    return values.tensordict(batch, names, len(ref), dense=session.settings.dense)
