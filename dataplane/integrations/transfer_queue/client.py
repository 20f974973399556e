"""`TransferQueueClient`: the calls by BatchMeta, each with an asynchronous twin.

`docs/transfer_queue.md` lists the differences from TransferQueue's client. A client has no connection of its own:
all clients of a process share one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Coroutine, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np

from dataplane.client.table_rows import Flags, TableSlice
from dataplane.errors import Misuse
from dataplane.integrations.transfer_queue import row_access, sampling
from dataplane.integrations.transfer_queue.errors import NoKey, NotThere
from dataplane.integrations.transfer_queue.partition import JobPartition, has_own_key
from dataplane.integrations.transfer_queue.row_access import Parser
from dataplane.integrations.transfer_queue.session import executor, session, twin

if TYPE_CHECKING:
    from transfer_queue.metadata import BatchMeta

log = logging.getLogger(__name__)

_TRIES = 8  # rows may be cleared between two questions


class TransferQueueClient:
    """The calls of this process; any thread may use it. The arguments of TransferQueue's constructor are ignored."""

    def __init__(self, client_id: str = "", controller_info: Any = None, **_: Any) -> None:
        self.client_id = client_id

    def initialize_storage_manager(self, manager_type: str = "", config: Any = None) -> None:
        """Does nothing: there is no storage manager."""

    def close(self) -> None:
        """Does nothing: the plane belongs to the process."""

    def _run_coroutine(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine, for a call of TransferQueue's own that was under way when this client replaced its
        client (`module_patch.take_over`)."""
        return executor("waits").submit(asyncio.run, coroutine).result()

    # putting

    def put(
        self,
        data: Any,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: Parser | None = None,
    ) -> BatchMeta:
        """Put the fields of a TensorDict: for the rows of `metadata`, with its tags, or as new rows of a partition.

        Raises ValueError if neither is given, StorageKeyNotFoundError if rows were cleared, SchemaMismatch,
        Backpressure, LimitExceeded.
        """
        rows, columns = row_access.rows_of(data), row_access.columns(data, data_parser)
        if metadata is None:
            if partition_id is None:
                raise ValueError("put takes metadata or a partition_id, and there is neither")
            if not rows:
                raise ValueError("there are no rows to put")
            partition = session().partition(partition_id)
            numbers = row_access.insert(partition, rows, columns)
            partition.note_shapes(data)
            return _new(partition, partition.indexes(numbers), list(columns)).add_fields(data)
        if not len(metadata):
            raise ValueError("the metadata has no rows")
        if rows != len(metadata):
            raise ValueError(f"{rows} rows of fields for metadata of {len(metadata)}")
        if len(set(metadata.partition_ids)) > 1:
            raise ValueError("rows are put into one partition at a time: use metadata.chunk_by_partition()")
        partition = session().partition(metadata.partition_ids[0])
        row_access.put_by_meta(partition, metadata, columns)
        partition.note_shapes(data)
        return metadata.add_fields(data)

    def set_custom_meta(self, metadata: BatchMeta) -> None:
        """Add the tags of the metadata to those of its rows."""
        own = session()
        for part in metadata.chunk_by_partition():
            if any(part.custom_meta):
                row_access.put_by_meta(own.partition(part.partition_ids[0]), part, None)

    # getting

    def get_meta(
        self,
        data_fields: Sequence[str] | None,
        batch_size: int | None = None,
        partition_id: str = "",
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> BatchMeta:
        """Get rows of a partition. mode "fetch": `batch_size` rows that have all the fields and that the task has not
        consumed, selected by the sampler of this process, which also chooses the rows that count as consumed from then
        on. "force_fetch": all rows; none counts as consumed. "insert": create rows, to be put later.

        timeout: seconds that "fetch" waits at the node; None: $TQ_CONTROLLER_GET_METADATA_TIMEOUT, or 1, or 0 with
        `polling_mode`. If there are too few rows, returns an empty BatchMeta with `polling_mode`, and raises
        NoSampleInTime otherwise.
        """
        given = data_fields, batch_size, partition_id, mode, task_name, sampling_config
        return self._get_meta(sampling.Withdrawal(), *given, timeout=timeout)

    @wraps(get_meta, assigned=())  # its signature
    async def async_get_meta(self, *args: Any, **kwargs: Any) -> BatchMeta:
        """As `get_meta`. A call that is cancelled gives no row to the task."""
        over = threading.Event()
        withdrawal = sampling.Withdrawal(over.is_set)
        call = executor("waits").submit(self._get_meta, withdrawal, *args, **kwargs)
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            over.set()
            call.add_done_callback(lambda _: executor("calls").submit(withdrawal.release))
            raise

    def _get_meta(
        self,
        withdrawal: sampling.Withdrawal,
        data_fields: Sequence[str] | None,
        batch_size: int | None = None,
        partition_id: str = "",
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> BatchMeta:
        own, cancelled = session(), withdrawal.over
        withdrawal.over = lambda: own.left or cancelled()
        partition = own.partition(partition_id)
        fields = list(data_fields or [])
        if mode == "force_fetch":
            return _every(partition, fields)
        if batch_size is None or batch_size < 1:
            raise ValueError(f"batch_size is 1 or more in mode {mode!r}, not {batch_size}")
        if mode == "insert":
            return _new(partition, partition.indexes(row_access.insert(partition, batch_size, None)), fields)
        if mode != "fetch":
            raise ValueError(f"mode is 'fetch', 'force_fetch' or 'insert', not {mode!r}")
        if not task_name or not fields:
            raise ValueError("mode 'fetch' takes data_fields and a task_name")
        polling = own.settings.polling
        wait_s = timeout if timeout is not None else 0.0 if polling else sampling.timeout_s()
        config = sampling_config or {}
        found = sampling.fetch(partition, fields, batch_size, task_name, own.sampler, config, wait_s, withdrawal)
        if found is None and not polling:
            raise sampling.too_few(partition, fields, batch_size, task_name, wait_s)
        return _new(partition, [], []) if found is None else found

    def get_data(self, metadata: BatchMeta) -> Any:
        """The fields of these rows as a TensorDict, in the order of the metadata. Raises StorageKeyNotFoundError (a
        KeyError) if rows were cleared."""
        if not metadata or not metadata.field_names:
            from tensordict import TensorDict

            return TensorDict({}, batch_size=[0])
        return row_access.read_by_meta(session(), metadata)

    # by key

    def kv_retrieve_meta(self, keys: list[str] | str, partition_id: str, create: bool = False) -> BatchMeta:
        """The rows with these keys, with the fields that all of them have. Missing keys are left out with a warning,
        or created with `create`."""
        named, partition = named_keys(keys), session().partition(partition_id)
        try:
            numbers = partition.table.numbers(named, create=True) if create else partition.named(named)
        except NotThere as error:
            log.warning("%s", error)
            rows = partition.all(tags=False)
            there = {} if rows is None else dict(zip(rows.keys, rows.numbers.tolist(), strict=True))
            numbers = np.array([there[key] for key in named if key in there], np.int64)
        if not len(numbers):
            return _new(partition, [], [])
        names = list(partition.table.schema())
        rows = partition.table.look(numbers, columns=names, missing_ok=True)
        all_have = [name for at, name in enumerate(names) if rows.have[:, at].all()]
        return partition.meta(rows, all_have, np.full(len(rows), bool(all_have), np.int8))

    def kv_retrieve_keys(self, global_indexes: Any, partition_id: str) -> list[str]:
        """The keys of rows by their global indexes, an int or a list of ints.

        Raises TypeError, ValueError for invalid indexes; NoKey (a RuntimeError) for rows without a key.
        """
        indexes = [global_indexes] if isinstance(global_indexes, int) else global_indexes
        if not isinstance(indexes, list) or not all(isinstance(each, int) for each in indexes):
            raise TypeError("global_indexes are an int, or a list of them")
        if not indexes:
            raise ValueError("global_indexes is an empty list")
        partition = session().partition(partition_id)
        rows = partition.all(tags=False)
        there = {} if rows is None else dict(zip(partition.indexes(rows.numbers), rows.keys, strict=True))
        keys = [there.get(index) for index in indexes]
        for index, key in zip(indexes, keys, strict=True):
            if key is None or has_own_key(key):
                why = "is not there" if key is None else "was put without a key"
                raise NoKey(f"the row with the global index {index} of partition {partition_id!r} {why}")
        return [str(key) for key in keys]

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        """The keys of one partition, or of all, with their tags."""
        from dataplane.integrations.transfer_queue import kv  # which needs this module

        return kv.kv_list(partition_id)

    # production and consumption

    def get_consumption_status(self, task_name: str, partition_id: str) -> tuple[Any, Any]:
        """The global indexes of a partition's rows, and for each whether the task has consumed it, as tensors; None
        and None if the partition does not exist. With $TQ_PRE_ALLOC_SAMPLE_NUM, at least that many rows, including
        future ones."""
        partition = session().partition(partition_id)
        rows, taken = _consumed(partition, task_name)
        if rows is None:
            return None, None
        return _tensors(partition, rows, taken.astype(np.int8))

    def get_production_status(self, data_fields: list[str], partition_id: str) -> tuple[Any, Any]:
        """The global indexes of a partition's rows, and for each which of the fields exist, as tensors; None and
        None if the partition does not exist, or no row has one of the fields."""
        partition = session().partition(partition_id)
        if not data_fields:
            return None, None
        rows = partition.all(data_fields, tags=False)
        if rows is None or any(name not in partition.table.schema() for name in data_fields):
            return None, None
        return _tensors(partition, rows, rows.have.astype(np.int8))

    def check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Whether the partition has rows and the task has consumed all of them."""
        _, status = self.get_consumption_status(task_name, partition_id)
        return status is not None and bool(status.numel()) and bool((status == 1).all())

    def check_production_status(self, data_fields: list[str], partition_id: str) -> bool:
        """Whether all rows have all of the fields."""
        _, status = self.get_production_status(data_fields, partition_id)
        return status is not None and bool((status == 1).all())

    def reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Mark the rows as not consumed by the task, or by any task. Returns True."""
        partition = session().partition(partition_id)
        if partition.all(tags=False) is None:
            log.warning("cannot reset the consumption of partition %r: it does not exist", partition_id)
        else:
            partition.table.release(task_name)
        return True

    def get_partition_list(self) -> list[str]:
        """The names of all partitions."""
        return session().partitions()

    # clearing

    def clear_samples(self, metadata: BatchMeta) -> None:
        """Delete these rows and free their memory. Missing rows are ignored."""
        own = session()
        for part in metadata.chunk_by_partition():
            partition = own.partition(part.partition_ids[0])
            partition.table.clear(partition.numbers(part.global_indexes))

    def clear_partition(self, partition_id: str) -> None:
        """Delete all rows of the partition and the record of their consumption."""
        own = session()
        own.partition(partition_id).drop()
        own.sampler.clear_cache(partition_id)

    async_put = twin(put, "puts")
    async_set_custom_meta = twin(set_custom_meta)
    async_get_data = twin(get_data)
    async_kv_retrieve_meta = twin(kv_retrieve_meta)
    async_kv_retrieve_keys = twin(kv_retrieve_keys)
    async_kv_list = twin(kv_list)
    async_clear_samples = twin(clear_samples)
    async_clear_partition = twin(clear_partition)
    async_get_consumption_status = twin(get_consumption_status)
    async_get_production_status = twin(get_production_status)
    async_check_consumption_status = twin(check_consumption_status)
    async_check_production_status = twin(check_production_status)
    async_reset_consumption = twin(reset_consumption)
    async_get_partition_list = twin(get_partition_list)


AsyncTransferQueueClient = TransferQueueClient
"""TransferQueue's class of this name has only the asynchronous calls."""


def get_client() -> TransferQueueClient:
    """The client of this process. Raises NotStarted if the process has no plane."""
    session()
    return TransferQueueClient()


def named_keys(keys: Any) -> list[str]:
    """Keys as a list. Raises ValueError for an empty list, TypeError for values that are not keys."""
    named = [keys] if isinstance(keys, str) else keys
    if not isinstance(named, list) or not all(isinstance(key, str) for key in named):
        raise TypeError("keys are a text, or a list of texts")
    if not named:
        raise ValueError("keys is an empty list")
    return named


def _new(partition: JobPartition, indexes: list[int], fields: Sequence[str]) -> BatchMeta:
    """Metadata of rows that have no fields yet."""
    from transfer_queue.metadata import BatchMeta

    known = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": False}
    return BatchMeta(indexes, [partition.name] * len(indexes), dict.fromkeys(fields, known))


def _every(partition: JobPartition, fields: Sequence[str]) -> BatchMeta:
    rows = partition.all(fields)
    if rows is None:
        raise partition.missing()
    ready = rows.have.all(axis=1) if fields else np.zeros(len(rows), np.int8)
    return partition.meta(rows, fields, ready)


def _consumed(partition: JobPartition, task: str) -> tuple[TableSlice | None, Flags]:
    for _ in range(_TRIES):
        rows = partition.all(tags=False)
        if rows is None or not len(rows):
            return rows, np.empty(0, np.bool_)
        try:
            return rows, partition.table.claimed(task, rows.numbers)
        except Misuse:  # one was cleared since
            continue
    raise Misuse(f"rows of partition {partition.name!r} are cleared all the time: ask again when that is done")


def _tensors(partition: JobPartition, rows: TableSlice, status: Any) -> tuple[Any, Any]:
    """The rows and their status as tensors; rows that do not exist yet come last."""
    import torch

    expected = int(os.environ.get("TQ_PRE_ALLOC_SAMPLE_NUM", 0))
    numbers = rows.numbers
    next_number = int(numbers[-1]) + 1 if len(numbers) else 0
    coming = np.arange(next_number, next_number + max(0, expected - len(numbers)))
    indexes = partition.indexes(np.concatenate([numbers, coming]))
    status = np.concatenate([status, np.zeros((len(coming), *status.shape[1:]), np.int8)])
    return torch.tensor(indexes, dtype=torch.long), torch.from_numpy(status)
