"""`get_meta` of ready rows: waits at the node until there are enough rows, samples in this process, and claims the
sample.

A sampler is one of TransferQueue's or a user's own. TransferQueue's samplers keep the state that ranks share in one
process. Here, ranks that have to get the same rows use the same claim id: the first of them samples, and the others get
its rows from the node. So no state is lost with a process. A group is the rows of one prompt: those with the same value
of the tag `uid`, or of the tag that the sampler's `group_by` names. Rows without the tag are grouped by position, from
the first row of the call that put them.

Invariants: a row is given to one call of a task, or to all calls with one claim id; if another call claimed a row
first, the sampler samples again from the rest; a call that times out or is withdrawn has claimed nothing, and blocks
no other call.
No batch mixes prompts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from dataplane.clock import Deadline
from dataplane.errors import DataplaneError, NotReady
from dataplane.integrations.transfer_queue.errors import NoSampleInTime
from dataplane.integrations.transfer_queue.partition import Index, JobPartition

if TYPE_CHECKING:
    from transfer_queue import BaseSampler
    from transfer_queue.metadata import BatchMeta

GROUP_BY = "uid"
"""The tag with the group of a row."""

_SLICE_S = 1.0  # seconds of waiting between two checks whether the call was withdrawn, or rows went to others


@dataclass(slots=True)
class Withdrawal:
    """Ends a call whose caller has stopped waiting. `over`: whether it has. `release`: undoes the claim that the call
    has made."""

    over: Callable[[], bool] = lambda: False
    release: Callable[[], None] = lambda: None


def timeout_s() -> float:
    """The default timeout of a call: TransferQueue's environment variable, or its default."""
    return float(os.environ.get("TQ_CONTROLLER_GET_METADATA_TIMEOUT", 1))


def fetch(
    partition: JobPartition,
    fields: Sequence[str],
    batch_size: int,
    task: str,
    sampler: BaseSampler,
    config: dict[str, Any],
    wait_s: float,
    withdrawal: Withdrawal,
) -> BatchMeta | None:
    """The next rows of the task, without those that are cleared at the same moment; None if there were too few before
    the timeout, or the call was withdrawn."""
    choosing = _Choosing(partition, list(fields), batch_size, task, sampler, config, withdrawal)
    chosen = choosing.choose(Deadline.after(wait_s))
    if chosen is None:
        return None
    rows = partition.table.look(chosen, missing_ok=True)
    return partition.meta(rows, fields, np.ones(len(rows), np.int8))


class _Choosing:
    def __init__(
        self,
        partition: JobPartition,
        fields: list[str],
        batch_size: int,
        task: str,
        sampler: BaseSampler,
        config: dict[str, Any],
        withdrawal: Withdrawal,
    ) -> None:
        from transfer_queue import GRPOGroupNSampler, RankAwareSampler, SeqlenBalancedSampler, SequentialSampler

        self._partition = partition
        self._fields = fields
        self._batch_size = batch_size
        self._task = task
        self._sampler = sampler
        self._config = config
        self._withdrawal = withdrawal
        own = type(sampler).sample
        self._in_order = own in (SequentialSampler.sample, RankAwareSampler.sample)
        self._grouped = own in (GRPOGroupNSampler.sample, SeqlenBalancedSampler.sample)
        self._deals = own is SeqlenBalancedSampler.sample
        self._claim = f"batch {config.get('batch_index', 0)}" if self._deals else None
        rank = config.get("dp_rank")
        if rank is not None and isinstance(sampler, GRPOGroupNSampler | RankAwareSampler):
            self._claim = self._claim or f"rank {rank} batch {config.get('batch_index')}"
            if rank < 0 or (self._deals and rank >= sampler.dp_size):
                raise ValueError(f"dp_rank is the number of a rank, from 0; it is {rank}")
        if self._grouped and batch_size % sampler.n_samples_per_prompt:
            raise ValueError(
                f"batch_size is a multiple of n_samples_per_prompt, {sampler.n_samples_per_prompt}; it is {batch_size}"
            )

    def choose(self, deadline: Deadline) -> Index | None:
        """The numbers of the rows; None if the deadline has passed, or the call was withdrawn."""
        table = self._partition.table
        least = wanted = self._batch_size * (self._sampler.dp_size if self._deals else 1)
        while not self._withdrawal.over():
            if self._claim is not None and (made := table.find_claim(self._task, self._claim)) is not None:
                return self._part(made)
            try:
                ready = table.ready(
                    self._fields,
                    task=self._task,
                    claim_id=self._claim,
                    least=least,
                    timeout=max(0.0, min(_SLICE_S, deadline.remaining_s)),
                )
            except NotReady:
                if not deadline.remaining_s:
                    return None
                least = wanted  # rows that the sampler refused may have gone to other calls
                continue
            sampled, consumed = self._sample(ready, wanted)
            if not len(sampled):
                least = len(ready) + 1  # the sampler refused these
                continue
            if self._withdrawal.over():
                return None
            if not len(consumed) and self._claim is None:
                return sampled
            given = table.claim(self._task, consumed, give=sampled, claim_id=self._claim)
            if given is not None:
                if self._claim is None:
                    self._withdrawal.release = partial(self._release, consumed)
                return self._part(given)
            self._sampler.clear_cache(self._partition.name)  # or it may choose rows that another call took
        return None

    def _release(self, consumed: Index) -> None:
        with suppress(DataplaneError):
            there = self._partition.table.look(consumed, tags=False, missing_ok=True)
            self._partition.table.release(self._task, there.numbers)

    def _sample(self, ready: Index, wanted: int) -> tuple[Index, Index]:
        """Of the ready rows, the sampled ones, and those that are consumed with them."""
        if self._in_order:
            return ready[:wanted], ready[:wanted]
        indexes = self._partition.indexes(ready)
        if self._grouped:
            size = self._sampler.n_samples_per_prompt
            whole = self._partition.groups(sorted(indexes), size, getattr(self._sampler, "group_by", GROUP_BY))
            rows = [row for group in whole[: wanted // size] for row in group]
            chosen = self._partition.numbers(rows if len(rows) == wanted else [])
            return chosen, chosen
        sampled, consumed = self._sampler(indexes, self._batch_size, partition=self._partition, **self._config)
        return self._partition.numbers(sampled), self._partition.numbers(consumed)

    def _part(self, given: Index) -> Index:
        """This rank's part of the claimed rows. All ranks get as many whole groups, and about as many tokens."""
        if not self._deals:
            return given
        from transfer_queue.sampler.seqlen_balanced_sampler import get_seqlen_balanced_partitions as dealt

        groups = given.reshape(-1, self._sampler.n_samples_per_prompt)
        rows = self._partition.indexes(given)
        known = self._partition.get_custom_meta(rows)
        lengths = np.array([int(known.get(row, {}).get("total_lengths", 1)) for row in rows]).reshape(groups.shape)
        parts = dealt(lengths.sum(axis=1).tolist(), self._sampler.dp_size, equal_size=True)
        part: Index = groups[parts[self._config.get("dp_rank") or 0]].reshape(-1)
        return part


def too_few(
    partition: JobPartition, fields: Sequence[str], batch_size: int, task: str, wait_s: float
) -> NoSampleInTime:
    """The error of a call that got no rows in time."""
    there = len(partition.table.ready(list(fields), task=task, least=0))
    return NoSampleInTime(
        f"task {task!r} wants {batch_size} rows of partition {partition.name!r} with {', '.join(fields)}; after"
        f" {wait_s:.1f} s it could have {there}, of which the sampler wanted none or too few",
        stream=partition.name,
        task=task,
        waited_s=wait_s,
    )
