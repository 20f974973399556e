"""The trainer as ranks of a `torch.distributed` group, over gloo: each learns from its share of every batch.

Rank 0 is the trainer; it takes the batches. It scatters their rows, whole groups to each rank, and the pixels of a
prompt are sent once for its eight responses. Then all add up their gradients, so their policies stay equal. A share
without rows says that the job is over.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import dataplane as dp
from examples.multimodal_grpo.job import Job

TIMEOUT_S = 120.0  # a rank waits for the next batch


class Ranks:
    """One of `job.ranks` ranks, which all meet at the file `store`. Of one rank, there is nothing to share."""

    def __init__(self, job: Job, rank: int, store: str) -> None:
        self._size = job.ranks
        if self._size > 1:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=self._size)

    def share(self, plane: dp.Plane, ref: dp.BatchRef | None) -> dp.Batch:
        """This rank's share of the rows that rank 0 names; equal numbers of groups, of which one has as many rows."""
        if self._size == 1 and ref is not None:
            return plane.get(ref)
        refs = None if ref is None else ref.chunk(self._size)
        return dp.collective.scatter(refs, None, plane=plane, timeout=TIMEOUT_S)

    def average(self, policy: torch.nn.Module) -> None:
        """Make the gradients those of the whole batch."""
        if self._size > 1:
            for parameter in policy.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= self._size

    def mean(self, value: torch.Tensor) -> float:
        """The mean of what each rank has."""
        if self._size > 1:
            dist.all_reduce(value)
        return value.item() / self._size

    def end(self, plane: dp.Plane, ref: dp.BatchRef) -> None:
        """Tell the other ranks that there are no more batches; `ref` is any that there was."""
        if self._size > 1:
            self.share(plane, ref[:0])
            dist.destroy_process_group()
