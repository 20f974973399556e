"""`StreamingDataset` and `StreamingDataLoader`: a task's rows as batches for a training loop.

As TransferQueue's, but that a batch is waited for in the node, and that several workers of one loader share the batches
instead of each getting all of them. This module can only be imported where torch is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dataplane.integrations.transfer_queue.client import TransferQueueClient, get_client
from dataplane.integrations.transfer_queue.errors import NoSampleInTime
from dataplane.integrations.transfer_queue.meta import BatchMeta
from dataplane.integrations.transfer_queue.session import session

Batch = tuple[Any, BatchMeta]


def _interval_s() -> float:
    return float(os.environ.get("TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL", 1))


class StreamingDataset(IterableDataset):  # type: ignore[misc]  # torch is typed as Any here
    """Micro-batches of the rows of a partition that a task has not consumed, with their metadata.

    config: what `init` gave; not needed. batch_size: rows that are asked for at once. micro_batch_size: rows of what
    iteration gives. dp_rank: ranks with the same one get the same rows, where the job's sampler sees to it.
    should_check_consumption_status: end once the task has consumed all rows of the partition; else go on for ever.
    fetch_batch_fn, process_batch_fn: in place of `default_fetch_batch_fn` and `chunk_batch_fn`.

    Batches stay in `buffer`, and come again after `reset()`. Raises ValueError.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        micro_batch_size: int,
        data_fields: list[str],
        partition_id: str,
        task_name: str,
        dp_rank: int,
        should_check_consumption_status: bool = False,
        fetch_batch_fn: Callable[..., Any] | None = None,
        process_batch_fn: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is 1 or more, not {micro_batch_size}")
        if not data_fields:
            raise ValueError("data_fields names one field or more")
        if dp_rank < 0:
            raise ValueError(f"dp_rank is 0 or more, not {dp_rank}")
        self.config = config
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.data_fields = data_fields
        self.partition_id = partition_id
        self.task_name = task_name
        self.dp_rank = dp_rank
        self.should_check_consumption_status = should_check_consumption_status
        self.fetch_batch_fn = fetch_batch_fn or default_fetch_batch_fn
        self.process_batch_fn = process_batch_fn or chunk_batch_fn
        self.sampling_config = {"dp_rank": dp_rank, "task_name": task_name}
        self.buffer: list[Batch] = []
        self.batch_index = 0

    def __iter__(self) -> Iterator[Batch]:
        client = get_client()
        worker = get_worker_info()
        own, workers = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        while self.batch_index < len(self.buffer) or not self._done(client):
            if self.batch_index < len(self.buffer):
                data, meta = self.buffer[self.batch_index]
                self.batch_index += 1
                yield from self.process_batch_fn(data, meta, micro_batch_size=self.micro_batch_size)
                continue
            data, meta = self.fetch_batch_fn(
                tq_client=client,
                data_fields=self.data_fields,
                batch_size=self.batch_size,
                partition_id=self.partition_id,
                task_name=self.task_name,
                sampling_config=self.sampling_config,
                batch_index=self.batch_index * workers + own,  # each worker has batches of its own
            )
            if data is not None:
                self.buffer.append((data, meta))
            elif self.fetch_batch_fn is not default_fetch_batch_fn:  # which has waited already
                time.sleep(_interval_s())

    def _done(self, client: TransferQueueClient) -> bool:
        return self.should_check_consumption_status and client.check_consumption_status(
            self.task_name, self.partition_id
        )

    def reset(self) -> None:
        """Begin again with the first batch."""
        self.batch_index = 0

    def step(self, partition_id: str) -> None:
        """Go on with another partition."""
        self.buffer = []
        self.batch_index = 0
        self.partition_id = partition_id


class StreamingDataLoader(DataLoader):  # type: ignore[misc]  # as above
    """A torch `DataLoader` of a `StreamingDataset`, which makes the batches. Workers are processes of their own, each
    with its own connection."""

    def __init__(
        self,
        dataset: StreamingDataset,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
    ) -> None:
        if num_workers:
            session()  # so that they find its address: they can not ask Ray
        super().__init__(
            dataset=dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=collate_fn or _as_it_is,
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )

    def reset(self) -> None:
        """Begin again with the first batch."""
        self.dataset.reset()

    def step(self, partition_id: str) -> None:
        """Go on with another partition."""
        self.dataset.step(partition_id)

    def get_buffer(self) -> list[Batch]:
        """The batches that the dataset of this process keeps."""
        buffer: list[Batch] = self.dataset.buffer
        return buffer


def _as_it_is(batch: Any) -> Any:
    return batch


def default_fetch_batch_fn(
    tq_client: TransferQueueClient,
    data_fields: list[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: dict[str, Any],
    batch_index: int,
) -> tuple[Any, BatchMeta]:
    """The next batch and its metadata; None and an empty one where there are too few rows after a while."""
    config = {**sampling_config, "batch_index": batch_index, "partition_id": partition_id}
    try:
        meta = tq_client.get_meta(
            data_fields, batch_size, partition_id, "fetch", task_name, config, timeout=_interval_s()
        )
    except NoSampleInTime:
        meta = BatchMeta.empty()
    return (tq_client.get_data(meta), meta) if len(meta) else (None, meta)


def chunk_batch_fn(td: Any, batch_meta: BatchMeta, micro_batch_size: int = 1) -> list[Batch]:
    """A TensorDict and its metadata, cut into parts of so many rows; the last has what is left.

    Raises TypeError for another thing, ValueError where it has fewer rows than a part.
    """
    import torch
    from tensordict import TensorDict

    if not isinstance(td, TensorDict):
        raise TypeError(f"a TensorDict is cut, not {type(td).__name__}")
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size is 1 or more, not {micro_batch_size}")
    if not len(td.batch_size):
        raise ValueError("a TensorDict without a batch dimension has no rows")
    rows = int(td.batch_size[0])
    if micro_batch_size > rows:
        raise ValueError(f"micro_batch_size is {micro_batch_size}, more than the {rows} rows")
    names = list(td.keys())
    nested = {name: td.get(name).unbind() for name in names if getattr(td.get(name), "is_nested", False)}
    rest = td.exclude(*nested)
    parts = []
    for start in range(0, rows, micro_batch_size):
        stop = min(start + micro_batch_size, rows)
        part = rest[start:stop]
        for name, each in nested.items():
            part[name] = torch.nested.as_nested_tensor(list(each[start:stop]), layout=td.get(name).layout)
        parts.append((part, batch_meta[start:stop]))
    return parts
