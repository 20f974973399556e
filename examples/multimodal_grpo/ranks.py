"""The ranks of the trainer, a `torch.distributed` group over gloo: each trains on its share of every batch.

Rank 0 consumes the batches and scatters their rows, whole groups to each rank. The pixels of a prompt are sent once for
its eight responses. All ranks average their gradients, so their policies stay equal. An empty share ends the job.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import dataplane as dp
from examples.multimodal_grpo.job import Job

TIMEOUT_S = 120.0  # for the next batch


class Ranks:
    """One of `job.ranks` ranks, which find each other by the file `store`. A single rank makes no collective call."""

    def __init__(self, job: Job, rank: int, store: str) -> None:
        self._size = job.ranks
        if self._size > 1:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=self._size)

    def share(self, plane: dp.Plane, ref: dp.BatchRef | None) -> dp.Batch:
        """This rank's share of the rows `ref` of rank 0; other ranks pass None. Shares have equal numbers of groups,
        and groups equal numbers of rows."""
        if self._size == 1 and ref is not None:
            return plane.get(ref)
        refs = None if ref is None else ref.chunk(self._size)
        return dp.collective.scatter(refs, None, plane=plane, timeout=TIMEOUT_S)

    def average(self, policy: torch.nn.Module) -> None:
        """Average the gradients over the ranks."""
        if self._size > 1:
            for parameter in policy.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= self._size

    def mean(self, value: torch.Tensor) -> float:
        """The mean of the ranks' values."""
        if self._size > 1:
            dist.all_reduce(value)
        return value.item() / self._size

    def end(self, plane: dp.Plane, ref: dp.BatchRef) -> None:
        """Send the other ranks an empty share, made from any reference `ref`: there are no more batches."""
        if self._size > 1:
            self.share(plane, ref[:0])
            dist.destroy_process_group()
