"""The calls by key, `kv_put` and so on, and their asynchronous twins.

`docs/transfer_queue.md` lists the differences from TransferQueue's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from dataplane.batch import tensordicts
from dataplane.integrations.transfer_queue import coalescing, row_access
from dataplane.integrations.transfer_queue.client import named_keys
from dataplane.integrations.transfer_queue.partition import has_own_key, shown
from dataplane.integrations.transfer_queue.row_access import Parser
from dataplane.integrations.transfer_queue.session import joined, run, session, twin

if TYPE_CHECKING:
    from transfer_queue.metadata import KVBatchMeta


def kv_put(
    key: str,
    partition_id: str,
    fields: Any = None,
    tag: dict[str, Any] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Put one row: its fields, a dict of values or a TensorDict of one row, its tag, or both.

    Raises ValueError if neither is given, or for a nested tensor; SchemaMismatch, Backpressure, LimitExceeded.
    """
    if fields is None and tag is None:
        raise ValueError("a row is put with fields, a tag, or both; there is neither")
    columns = None if fields is None else row_access.one_row(fields, data_parser)
    return _put([key], partition_id, columns, None if tag is None else [tag])


def kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: Any = None,
    tags: list[dict[str, Any]] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Put rows: the fields of a TensorDict, one tag a row, or both.

    Raises ValueError if neither is given, or there are not as many rows, or tags, as keys; SchemaMismatch for
    unsupported values, Backpressure, LimitExceeded.
    """
    if fields is None and tags is None:
        raise ValueError("rows are put with fields, tags, or both; there is neither")
    columns = None
    if fields is not None:
        rows = row_access.rows_of(fields)
        if rows != len(keys):
            raise ValueError(f"{len(keys)} keys for {rows} rows of fields: give one a row")
        columns = row_access.columns(fields, data_parser)
    if tags is not None and len(tags) != len(keys):
        raise ValueError(f"{len(keys)} keys for {len(tags)} tags: give one a row")
    return _put(keys, partition_id, columns, tags)


def _put(keys: Sequence[str], partition_id: str, columns: Any, tags: Any) -> KVBatchMeta:
    named, own = named_keys(list(keys)), session()
    found, fields = row_access.put_by_key(
        own.partition(partition_id), named, columns, tags, grouped=own.settings.grouped and columns is not None
    )
    return coalescing.metadata(partition_id, named, found.tags, fields)


def kv_batch_get(keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None) -> Any:
    """The rows with these keys as a TensorDict, with the selected fields, or with all fields that every one of these
    rows has.

    Raises NotThere (a ValueError) if the partition, a key, or a field of some of the keys does not exist,
    StorageKeyNotFoundError (a KeyError) if rows were cleared meanwhile.
    """
    own = session()
    fields = [select_fields] if isinstance(select_fields, str) else select_fields
    return row_access.read_by_key(own, own.partition(partition_id), named_keys(keys), fields)


def kv_batch_get_by_meta(meta: KVBatchMeta, select_fields: list[str] | str | None = None) -> Any:
    """The rows of a KVBatchMeta as a TensorDict: its fields, or the selected ones. Raises as `kv_batch_get`, and
    ValueError for a field that the metadata does not have."""
    if meta.partition_id is None:
        raise ValueError("the KVBatchMeta has no partition_id: set it")
    if select_fields is None:
        return kv_batch_get(meta.keys, meta.partition_id, meta.fields)
    fields = [select_fields] if isinstance(select_fields, str) else list(select_fields)
    absent = [name for name in fields if name not in (meta.fields or [])]
    if absent:
        raise ValueError(f"select_fields: {absent[0]!r} was not found in the KVBatchMeta, which has {meta.fields}")
    return kv_batch_get(meta.keys, meta.partition_id, fields)


def kv_list(partition_id: str | None = None) -> dict[str, dict[str, Any]]:
    """The tags of all rows with a key of the user's, by partition and key."""
    own, found = session(), {}
    for name in own.partitions() if partition_id is None else [partition_id]:
        rows = own.partition(name).all()
        if rows is not None:
            pairs = zip(rows.keys, rows.tags, strict=True)
            found[name] = {key: shown(tags) for key, tags in pairs if not has_own_key(key)}
    return found


def kv_clear(keys: list[str] | str, partition_id: str) -> None:
    """Delete these rows and free their memory. Missing keys are ignored."""
    session().partition(partition_id).table.clear(named_keys(keys))


@wraps(kv_put)
async def async_kv_put(
    key: str,
    partition_id: str,
    fields: Any = None,
    tag: dict[str, Any] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    alone = partial(kv_put, key, partition_id, fields, tag, data_parser)
    given = isinstance(fields, Mapping) or tag is not None
    one = given and data_parser is None and _asked([key], partition_id, fields, None if tag is None else [tag], alone)
    return await (_put_beside(one) if one else run(alone, "puts"))


@wraps(kv_batch_put)
async def async_kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: Any = None,
    tags: list[dict[str, Any]] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    alone = partial(kv_batch_put, keys, partition_id, fields, tags, data_parser)
    given = tensordicts.is_tensordict(fields) or (fields is None and tags is not None)
    one = given and data_parser is None and _asked(keys, partition_id, fields, tags, alone)
    return await (_put_beside(one) if one else run(alone, "puts"))


def _asked(
    keys: Any, partition_id: str, fields: Any, tags: Any, alone: Callable[[], KVBatchMeta]
) -> coalescing.Asked | None:
    """The put as one that can be merged with others. Puts of groups, and puts of a process that has not joined its
    job yet, are made alone."""
    own = joined()
    if own is None or own.settings.grouped or not isinstance(keys, list) or not all(type(key) is str for key in keys):
        return None
    return coalescing.asked(keys, partition_id, fields, tags, alone)


async def _put_beside(one: coalescing.Asked) -> KVBatchMeta:
    return await (_large_puts if one.large else _puts).put(one)


_puts = coalescing.Coalescing()
_large_puts = coalescing.Coalescing()  # which may wait for room
async_kv_batch_get = twin(kv_batch_get)
async_kv_batch_get_by_meta = twin(kv_batch_get_by_meta)
async_kv_list = twin(kv_list)
async_kv_clear = twin(kv_clear)
