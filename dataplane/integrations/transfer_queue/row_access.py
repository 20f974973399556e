"""Puts the fields of a TensorDict as rows of a partition, and gets rows of partitions as a TensorDict.

Invariants: a failed put stores nothing; for existing rows, new fields replace old ones and new tags are added to old
ones. All requested rows are returned in their order, or an error names the missing ones. By key, a field that not all
of the rows have is left out with a warning that names the rows, as in TransferQueue: verl's trainer asks for optional
fields. If no field is left, that is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dataplane.batch import tensordicts, tensors
from dataplane.batch.concat import concat
from dataplane.batch.ref import BatchRef
from dataplane.batch.values import Values
from dataplane.client.table_rows import TableSlice
from dataplane.errors import DataplaneError, Freed, Misuse
from dataplane.integrations.transfer_queue import sharing, values
from dataplane.integrations.transfer_queue.errors import NotThere, StorageKeyNotFoundError
from dataplane.integrations.transfer_queue.partition import PUT, Index, JobPartition, marks, new_keys
from dataplane.integrations.transfer_queue.session import Session

if TYPE_CHECKING:
    from transfer_queue.metadata import BatchMeta

log = logging.getLogger(__name__)

Parser = Callable[[Any], Any]
Tags = Sequence[Mapping[str, Any]]


def rows_of(fields: Any) -> int:
    """The number of rows of a TensorDict. Raises ValueError for anything else."""
    if not tensordicts.is_tensordict(fields) or not len(getattr(fields, "batch_size", ())):
        raise ValueError(f"fields are a TensorDict with a batch dimension, not {type(fields).__name__}")
    return int(fields.batch_size[0])


def columns(fields: Any, parser: Parser | None = None) -> dict[str, Values]:
    """The fields as columns, after `parser` if there is one. Raises SchemaMismatch, ValueError."""
    rows = rows_of(fields)
    if parser is None:
        return values.columns(fields, rows)
    given = {name: _batched(name, fields.get(name)) for name in fields.keys()}  # noqa: SIM118  # iteration is over rows
    return _parsed(given, rows, parser)


def _parsed(given: dict[str, Any], rows: int, parser: Parser) -> dict[str, Values]:
    names = set(given)
    parsed = parser(given)
    given = given if parsed is None else parsed
    if not isinstance(given, dict) or set(given) != names or any(len(each) != rows for each in given.values()):
        raise ValueError("a data_parser returns the fields that it was given, no others, with a value for each row")
    return {name: values.column(name, each, rows) for name, each in given.items()}


def one_row(fields: Any, parser: Parser | None = None) -> dict[str, Values]:
    """The fields of one row, from a TensorDict of one row or a dict of its values. `parser` is applied to them
    first. Raises SchemaMismatch, ValueError."""
    if not isinstance(fields, Mapping) or tensordicts.is_tensordict(fields):
        if not tensordicts.is_tensordict(fields) or rows_of(fields) != 1:
            raise ValueError("the fields of one key are a dict of its values, or a TensorDict of one row")
        return columns(fields, parser)
    for name, value in fields.items():
        if tensors.is_tensor(value) and value.is_nested:
            raise ValueError(f"{name!r} is a nested tensor, which has several rows: use kv_batch_put")
    given = {name: value[None] if tensors.is_tensor(value) else [value] for name, value in fields.items()}
    if parser is not None:
        return _parsed(given, 1, parser)
    return {name: values.column(name, each, 1) for name, each in given.items()}


def _batched(name: str, entry: Any) -> Any:
    """A field as a parser expects it: a tensor of all rows, or a list with one value a row."""
    if tensors.is_tensor(entry):
        return list(entry.unbind()) if entry.is_nested else entry
    return list(tensordicts.rows_of(name, entry))


def put_by_key(
    partition: JobPartition, keys: list[str], columns: Mapping[str, Values] | None, tags: Tags | None, *, grouped: bool
) -> tuple[TableSlice, list[str]]:
    """Put rows by key. Returns their metadata, with the fields that all of them have. `grouped`: tag each new row
    with the call that put it."""
    table = partition.table
    made = np.empty(0, np.int64)
    if grouped:
        numbers = table.numbers(keys, create=True)
        found = table.look(numbers, columns=list(table.schema()), missing_ok=True)
        bare = ~found.have.any(axis=1) & np.array([PUT not in each for each in found.tags], np.bool_)
        made = found.numbers[bare]  # rows that have nothing yet are new
        new, given = np.isin(numbers, made).tolist(), tags or [{}] * len(keys)
        tags = [{**mark, **own} if of else own for of, mark, own in zip(new, marks(len(keys)), given, strict=True)]
    try:
        rows, names = put(partition, keys, columns, tags)
    except BaseException:
        if len(made):
            with suppress(DataplaneError):
                table.clear(_bare(partition, made))
        raise
    return rows, sorted(name for at, name in enumerate(names) if rows.have[:, at].all())


def _bare(partition: JobPartition, numbers: Index) -> Index:
    """The rows among these that have no field and no tag."""
    found = partition.table.look(numbers, columns=list(partition.table.schema()))
    return numbers[~found.have.any(axis=1) & np.array([not tags for tags in found.tags], np.bool_)]


def put(
    partition: JobPartition,
    keys: list[str],
    columns: Mapping[str, Values] | None,
    tags: Tags | None,
    known_keys: sharing.Keys | None = None,
) -> tuple[TableSlice, list[str]]:
    """Put rows by key. Returns their metadata with all fields of the partition, and the names of these.
    `known_keys`: see `sharing.write`."""
    return sharing.write(partial(partition.table.upsert_and_look, keys, tags=tags), columns, known_keys)


def insert(partition: JobPartition, rows: int, columns: Mapping[str, Values] | None) -> Index:
    """Put rows without keys. Returns their numbers."""
    keys = new_keys(rows)
    if columns is None:
        return partition.table.numbers(keys, create=True)
    return sharing.write(partial(partition.table.upsert, keys), columns)


def put_by_meta(partition: JobPartition, meta: BatchMeta, columns: Mapping[str, Values] | None) -> None:
    """Put more fields, and the tags, of the rows of a BatchMeta. Raises StorageKeyNotFoundError if a row was
    cleared."""
    tags = meta.custom_meta if any(meta.custom_meta) else None
    numbers = partition.numbers(meta.global_indexes)
    if len(np.unique(numbers)) != len(numbers):
        raise ValueError("the metadata names a row twice: put each row once")
    try:
        sharing.write(partial(partition.table.upsert, numbers, tags=tags), columns)
    except Misuse as error:
        gone(partition, meta.global_indexes, numbers, error)
        raise


def gone(partition: JobPartition, indexes: Sequence[int], numbers: Index, error: Exception) -> None:
    """Raises StorageKeyNotFoundError if any of the rows with these indexes and numbers is missing; returns
    otherwise."""
    rows = partition.all(tags=False)
    lost = np.flatnonzero(~np.isin(numbers, [] if rows is None else rows.numbers))
    if len(lost):
        raise StorageKeyNotFoundError(
            f"{len(lost)} of {len(numbers)} rows of partition {partition.name!r} were cleared, the first has the global"
            f" index {indexes[int(lost[0])]}: look the rows up again"
        ) from error


def read_by_key(session: Session, partition: JobPartition, keys: list[str], fields: list[str] | None) -> Any:
    """The rows with these keys: these fields, or all fields that every one of these rows has. Raises NotThere,
    StorageKeyNotFoundError."""

    def read() -> BatchRef:
        try:
            return partition.table.read(keys, fields)
        except Misuse as error:
            return partition.table.read(keys, _fields(partition, keys, fields, error))

    return _tensordict(session, read, lambda ref: sorted(ref.columns))


def _fields(partition: JobPartition, keys: list[str], fields: list[str] | None, error: Misuse) -> list[str]:
    """The fields among these that all rows have. Raises NotThere if keys are missing, or every field is."""
    names = list(partition.table.schema()) if fields is None else list(dict.fromkeys(fields))
    numbers = partition.named(keys)
    rows = partition.table.look(numbers, columns=names, tags=False, missing_ok=True)
    if len(rows) < len(numbers):
        raise partition.absent(keys) from error
    have = rows.have
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


def read_by_meta(session: Session, meta: BatchMeta) -> Any:
    """The rows of a BatchMeta, of one partition or several, with all fields that it names. Raises
    StorageKeyNotFoundError if rows were cleared, NotThere if a field was not put."""
    names = meta.field_names
    places: dict[str, list[int]] = {}
    for place, name in enumerate(meta.partition_ids):
        places.setdefault(name, []).append(place)

    def read() -> BatchRef:
        parts = [(session.partition(name), [meta.global_indexes[i] for i in at]) for name, at in places.items()]
        ref = concat([_ref(partition, indexes, names) for partition, indexes in parts])
        if len(parts) > 1:
            ref = ref[np.argsort(np.concatenate([np.array(at) for at in places.values()]))]
        return ref

    return _tensordict(session, read, lambda ref: names)


def _ref(partition: JobPartition, indexes: Sequence[int], names: list[str]) -> BatchRef:
    numbers = partition.numbers(indexes)
    try:
        return partition.table.read(numbers, names)
    except Misuse as error:
        gone(partition, indexes, numbers, error)
        raise NotThere(f"partition {partition.name!r}: {error}") from error


def _tensordict(session: Session, read: Callable[[], BatchRef], names: Callable[[BatchRef], Sequence[str]]) -> Any:
    """The values that `read` refers to. They are read once more if they were replaced during the read."""
    ref = read()
    try:
        batch = session.plane.get(ref)
    except Freed:
        ref = read()
        try:
            batch = session.plane.get(ref)
        except Freed as error:
            raise StorageKeyNotFoundError(f"rows were cleared while they were read: {error}") from error
    return values.tensordict(batch, names(ref), len(ref), dense=session.settings.dense)
