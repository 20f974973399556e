"""TransferQueue's `StreamingDataset` and `StreamingDataLoader`, with a client of our own.

Differences: the wait for a batch is at the node, and the workers of one loader share the batches; TransferQueue
gives each worker all of them. The import of this module needs TransferQueue.
"""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import get_worker_info
from transfer_queue import dataloader
from transfer_queue.metadata import BatchMeta

from dataplane.integrations.transfer_queue import module_patch
from dataplane.integrations.transfer_queue.client import TransferQueueClient
from dataplane.integrations.transfer_queue.errors import NoSampleInTime
from dataplane.integrations.transfer_queue.session import session

_WAIT_S = 1.0  # between two looks at whether all has been consumed


class StreamingDataset(dataloader.StreamingDataset):  # type: ignore[misc]  # it has no types
    """TransferQueue's class. `config` is ignored."""

    def _create_client(self) -> None:
        self._tq_client = _Client(self)


class StreamingDataLoader(dataloader.StreamingDataLoader):  # type: ignore[misc]  # as above
    """TransferQueue's class. Workers are processes with a connection each."""

    def __init__(self, dataset: StreamingDataset, num_workers: int = 0, *args: Any, **kwargs: Any) -> None:
        if num_workers:
            session()  # so that they find its address: they can not ask Ray
        super().__init__(dataset, num_workers, *args, **kwargs)


class _Client(TransferQueueClient):
    """The client that a data set fetches its batches with."""

    def __init__(self, dataset: StreamingDataset) -> None:
        super().__init__()
        self._dataset = dataset

    def get_meta(self, *args: Any, **kwargs: Any) -> BatchMeta:
        """The next batch, waiting for it; an empty one, which ends the data set, once all rows were consumed."""
        config, worker = dict(kwargs.get("sampling_config") or {}), get_worker_info()
        if worker is not None and "batch_index" in config:  # each has batches of its own
            config["batch_index"] = config["batch_index"] * worker.num_workers + worker.id
        kwargs |= {"sampling_config": config, "timeout": _WAIT_S}
        while True:
            try:
                return super().get_meta(*args, **kwargs)
            except NoSampleInTime:
                ends, task = self._dataset.should_check_consumption_status, self._dataset.task_name
                if ends and self.check_consumption_status(task, self._dataset.partition_id):
                    return BatchMeta.empty()


if not module_patch.is_in() and os.environ.get(module_patch.VARIABLE):
    module_patch.install(dense=module_patch.dense())  # as by the import of TransferQueue, which needs this module
