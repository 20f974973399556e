"""What has been put and what has been consumed: the calls of the client that ask for it, and `reset_consumption`."""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np

from dataplane.client.tablerows import Flags, Rows
from dataplane.errors import Misuse
from dataplane.integrations.transfer_queue.partition import Partition
from dataplane.integrations.transfer_queue.session import session
from dataplane.integrations.transfer_queue.twins import twin

log = logging.getLogger(__name__)

_TRIES = 8  # rows may be cleared between two questions


class Status:
    """That part of the client."""

    def get_consumption_status(self, task_name: str, partition_id: str) -> tuple[Any, Any]:
        """The global indexes of a partition's rows, and of each whether the task has consumed it, as tensors; None and
        None where there is no partition. With $TQ_PRE_ALLOC_SAMPLE_NUM, at least so many rows, with those to come."""
        partition = session().partition(partition_id)
        rows, taken = _consumed(partition, task_name)
        if rows is None:
            return None, None
        return _tensors(partition, rows, taken.astype(np.int8))

    def get_production_status(self, data_fields: list[str], partition_id: str) -> tuple[Any, Any]:
        """The global indexes of a partition's rows, and of each which of the fields have been put, as tensors; None and
        None where there is no partition, or a field that no row has."""
        partition = session().partition(partition_id)
        if not data_fields:
            return None, None
        rows = partition.all(data_fields, tags=False)
        if rows is None or any(name not in partition.table.schema() for name in data_fields):
            return None, None
        return _tensors(partition, rows, rows.have.astype(np.int8))

    def check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Whether there are rows, and the task has consumed all of them."""
        _, status = self.get_consumption_status(task_name, partition_id)
        return status is not None and bool(status.numel()) and bool((status == 1).all())

    def check_production_status(self, data_fields: list[str], partition_id: str) -> bool:
        """Whether all rows have all of the fields."""
        _, status = self.get_production_status(data_fields, partition_id)
        return status is not None and bool((status == 1).all())

    def reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Rows are as if the task, or all tasks, had never consumed them. True."""
        partition = session().partition(partition_id)
        if partition.all(tags=False) is None:
            log.warning("there is no partition %r whose consumption could be reset", partition_id)
        else:
            partition.table.untake(task_name)
        return True

    def get_partition_list(self) -> list[str]:
        """The names of all partitions."""
        return session().partitions()

    async_get_consumption_status = twin(get_consumption_status)
    async_get_production_status = twin(get_production_status)
    async_check_consumption_status = twin(check_consumption_status)
    async_check_production_status = twin(check_production_status)
    async_reset_consumption = twin(reset_consumption)
    async_get_partition_list = twin(get_partition_list)


def _consumed(partition: Partition, task: str) -> tuple[Rows | None, Flags]:
    for _ in range(_TRIES):
        rows = partition.all(tags=False)
        if rows is None or not len(rows):
            return rows, np.empty(0, np.bool_)
        try:
            return rows, partition.table.taken(task, rows.numbers)
        except Misuse:  # one was cleared since
            continue
    raise Misuse(f"rows of partition {partition.name!r} are cleared all the time: ask again when that is done")


def _tensors(partition: Partition, rows: Rows, status: Any) -> tuple[Any, Any]:
    """As tensors, with rows that are not there yet behind those that are."""
    import torch

    expected = int(os.environ.get("TQ_PRE_ALLOC_SAMPLE_NUM", 0))
    numbers = rows.numbers
    next_number = int(numbers[-1]) + 1 if len(numbers) else 0
    coming = np.arange(next_number, next_number + max(0, expected - len(numbers)))
    indexes = partition.indexes(np.concatenate([numbers, coming]))
    status = np.concatenate([status, np.zeros((len(coming), *status.shape[1:]), np.int8)])
    return torch.tensor(indexes, dtype=torch.long), torch.from_numpy(status)
