"""`get_meta` of ready rows: waits in the node until there are enough, samples here, and takes what was sampled.

What always holds: a row is given to one call of a task, or to all that make one claim; where another took a row first,
the sampler chooses again among those that are left; a call that gives up has taken nothing. Nobody else waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from dataplane.clock import Deadline
from dataplane.errors import NotReady
from dataplane.integrations.transfer_queue.errors import NoSampleInTime
from dataplane.integrations.transfer_queue.meta import BatchMeta
from dataplane.integrations.transfer_queue.partition import Index, Partition
from dataplane.integrations.transfer_queue.samplers import BaseSampler


def timeout_s() -> float:
    """How long a call that names no time waits: TransferQueue's variable, and its default."""
    return float(os.environ.get("TQ_CONTROLLER_GET_METADATA_TIMEOUT", 1))


def fetch(
    partition: Partition,
    fields: Sequence[str],
    batch_size: int,
    task: str,
    sampler: BaseSampler,
    config: dict[str, Any],
    wait_s: float,
) -> BatchMeta | None:
    """The rows that the task gets next; None where there were too few in time."""
    chosen = _Choosing(partition, list(fields), batch_size, task, sampler, config).choose(Deadline.after(wait_s))
    if chosen is None:
        return None
    rows = partition.table.look(chosen)
    return partition.meta(rows, fields, np.ones(len(rows), np.int8))


class _Choosing:
    """One call's choice."""

    def __init__(
        self,
        partition: Partition,
        fields: list[str],
        batch_size: int,
        task: str,
        sampler: BaseSampler,
        config: dict[str, Any],
    ) -> None:
        self._partition = partition
        self._fields = fields
        self._batch_size = batch_size
        self._task = task
        self._sampler = sampler
        self._config = config
        self._claim = sampler.claim(**config) or None
        self._shares = type(sampler).share is not BaseSampler.share

    def choose(self, deadline: Deadline) -> Index | None:
        """The numbers of the rows; None where the deadline has passed."""
        table, least = self._partition.table, self._least()
        while True:
            if self._claim is not None and (made := table.claimed(self._task, self._claim)) is not None:
                return self._part(made)
            try:
                ready = table.ready(
                    self._fields,
                    task=self._task,
                    claim=self._claim,
                    least=least,
                    timeout=max(0.0, deadline.remaining_s),
                )
            except NotReady:
                return None
            sampled, consumed = self._sample(ready)
            if not len(sampled):
                least = len(ready) + 1  # these were not what it wants
                continue
            if not len(consumed) and self._claim is None:
                return sampled
            given = table.take(self._task, consumed, give=consumed if self._shares else sampled, claim=self._claim)
            if given is not None:
                return self._part(given)

    def _least(self) -> int:
        """How many rows are to be ready before the sampler is asked."""
        return self._batch_size * (getattr(self._sampler, "dp_size", 1) if self._shares else 1)

    def _sample(self, ready: Index) -> tuple[Index, Index]:
        sampled, consumed = self._sampler(
            self._partition.indexes(ready), self._batch_size, partition=self._partition, **self._config
        )
        return self._partition.numbers(sampled), self._partition.numbers(consumed)

    def _part(self, given: Index) -> Index:
        """This caller's part of what was given under a claim."""
        if not self._shares:
            return given
        config = {**self._config, "partition": self._partition}
        return self._partition.numbers(self._sampler.share(self._partition.indexes(given), self._batch_size, **config))


def too_few(partition: Partition, fields: Sequence[str], batch_size: int, task: str, wait_s: float) -> NoSampleInTime:
    """The error for a call that got no rows in time."""
    there = len(partition.table.ready(list(fields), task=task, least=0))
    return NoSampleInTime(
        f"task {task!r} wants {batch_size} rows of partition {partition.name!r} with {', '.join(fields)}; after"
        f" {wait_s:.1f} s it could have {there}, of which the sampler wanted none or too few",
        stream=partition.name,
        task=task,
        waited_s=wait_s,
    )
