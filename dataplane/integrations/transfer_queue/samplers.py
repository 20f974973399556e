"""Which of the ready rows a task gets next: samplers with TransferQueue's interface, run in the process that asks.

`sample(ready_indexes, batch_size, ...)` gives what to return and what is consumed; nothing where it wants more rows to
choose from. What always holds: a row is consumed by one call, however many processes sample at once, since it is taken
where the table is; ranks that are to see the same rows make the same `claim`, and the first to make it chooses for all.
The samplers here keep no state, so that any process may stand in for another.

A group is the rows of one prompt. Rows have a tag (`group_by`) that names it; or, where they lack it, were put by one
call, prompt by prompt: then groups are counted off from the first row of that call. So no batch ever mixes prompts,
whatever is missing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from dataplane.integrations.transfer_queue.balance import balanced, get_seqlen_balanced_partitions, karmarkar_karp

__all__ = [
    "BaseSampler",
    "GRPOGroupNSampler",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "get_seqlen_balanced_partitions",
    "karmarkar_karp",
]

Chosen = tuple[list[int], list[int]]


class Partition(Protocol):
    """What a sampler may ask of the partition: `partition=` of its `sample`."""

    def get_custom_meta(self, global_indices: Sequence[int]) -> dict[int, dict[str, Any]]:
        """The tags of these rows."""

    def groups(self, global_indices: Sequence[int], size: int, tag: str) -> list[list[int]]:
        """Those of these rows that form whole groups of so many, each in its own order; in the order of the rows."""


class BaseSampler(ABC):
    """What chooses. Users' own derive from this, and are given to `init()` in each process that samples."""

    def __init__(self) -> None:
        self._states: dict[Any, Any] = {}

    @abstractmethod
    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Chosen:
        """What is returned, and what is consumed, of the rows that are ready; two empty lists: wait for more.

        kwargs: `partition`, and what the caller has in its `sampling_config`.
        """
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Chosen:
        return self.sample(*args, **kwargs)

    def claim(self, **config: Any) -> str:
        """The name of this choice, from the `sampling_config`: who makes the same claim gets the same rows. Empty: none
        but this call gets them."""
        return ""

    def share(self, chosen: list[int], batch_size: int, **config: Any) -> list[int]:
        """Which of the rows that were chosen under a claim are this caller's."""
        return chosen

    def has_cached_result(
        self, partition_id: str, task_name: str, sampling_config: dict[str, Any] | None = None
    ) -> bool:
        """Whether `_states[partition_id][task_name][dp_rank][batch_index]` is there, for samplers that keep it."""
        config = sampling_config or {}
        kept = self._states.get(partition_id, {}).get(task_name, {}).get(config.get("dp_rank"), {})
        return config.get("dp_rank") is not None and config.get("batch_index") in kept

    def clear_cache(self, partition_id: str) -> None:
        """Forget what is kept of a partition that was cleared."""
        self._states.pop(partition_id, None)

    def save_checkpoint(self) -> dict[str, Any]:
        """What to save of the state."""
        return {"_states": self._states}

    def load_checkpoint(self, state: dict[str, Any]) -> None:
        """Take over what `save_checkpoint` gave."""
        self._states = state["_states"]


class SequentialSampler(BaseSampler):
    """The first that are ready, each once."""

    def sample(self, ready_indexes: list[int], batch_size: int, *args: Any, **kwargs: Any) -> Chosen:
        """The first so many, or all."""
        chosen = ready_indexes[:batch_size]
        return chosen, chosen


class RankAwareSampler(BaseSampler):
    """The first that are ready, the same for all ranks with the same `dp_rank` and `batch_index`."""

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        dp_rank: int = 0,
        batch_index: int = 0,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Chosen:
        """The first so many, or none. Raises ValueError for a rank below 0."""
        if dp_rank < 0:
            raise ValueError(f"dp_rank is 0 or more, not {dp_rank}")
        chosen = ready_indexes[:batch_size]
        return (chosen, chosen) if len(chosen) == batch_size else ([], [])

    def claim(self, **config: Any) -> str:
        """One a rank and batch."""
        return _of_rank(config)


class GRPOGroupNSampler(BaseSampler):
    """Whole groups: all `n_samples_per_prompt` rows of a prompt, or none. `group_by`: the tag that names the group."""

    def __init__(self, n_samples_per_prompt: int = 1, group_by: str = "uid") -> None:
        super().__init__()
        if n_samples_per_prompt <= 0:
            raise ValueError(f"n_samples_per_prompt is 1 or more, not {n_samples_per_prompt}")
        self.n_samples_per_prompt = n_samples_per_prompt
        self.group_by = group_by

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Chosen:
        """The rows of the first groups that are whole, or none where they are too few. Raises ValueError where
        batch_size is not that of whole groups."""
        size = self.n_samples_per_prompt
        if batch_size % size:
            raise ValueError(f"batch_size is a multiple of n_samples_per_prompt, {size}; it is {batch_size}")
        partition: Partition | None = kwargs.get("partition")
        ready = sorted(ready_indexes)
        whole = aligned(ready, size) if partition is None else partition.groups(ready, size, self.group_by)
        if len(whole) * size < batch_size:
            return [], []
        chosen = [row for group in whole[: batch_size // size] for row in group]
        return chosen, chosen.copy()

    def claim(self, **config: Any) -> str:
        """One a rank and batch."""
        return _of_rank(config)


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """Whole groups, dealt to `dp_size` ranks so that the sums of the tag `total_lengths` are about equal.

    `batch_size` is that of a rank. One choice serves all ranks of a `batch_index`.
    """

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1, group_by: str = "uid") -> None:
        super().__init__(n_samples_per_prompt, group_by)
        if dp_size <= 0:
            raise ValueError(f"dp_size is 1 or more, not {dp_size}")
        self.dp_size = dp_size

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> Chosen:
        """This rank's rows; consumed are those of all ranks."""
        chosen, consumed = super().sample(
            ready_indexes, batch_size * self.dp_size, task_name, partition_id, *args, **kwargs
        )
        return (self.share(chosen, batch_size, **kwargs), consumed) if chosen else ([], [])

    def claim(self, **config: Any) -> str:
        """One a batch."""
        return f"batch {config.get('batch_index', 0)}"

    def share(self, chosen: list[int], batch_size: int, **config: Any) -> list[int]:
        """Those of this rank, of what was chosen for all."""
        size, partition = self.n_samples_per_prompt, config.get("partition")
        groups = [chosen[i : i + size] for i in range(0, len(chosen), size)]
        known = partition.get_custom_meta(chosen) if partition is not None else {}
        lengths = [sum(int(known.get(row, {}).get("total_lengths", 1)) for row in group) for group in groups]
        rank = int(config.get("dp_rank", 0))
        if not 0 <= rank < self.dp_size:
            raise ValueError(f"dp_rank is from 0 to {self.dp_size - 1}, not {rank}")
        return [row for i in balanced(lengths, self.dp_size)[rank] for row in groups[i]]


def aligned(ready: Sequence[int], size: int) -> list[list[int]]:
    """Whole groups where nothing is known of the rows but their indexes: counted off from 0."""
    whole: list[list[int]] = []
    there = set(ready)
    for first in ready:
        if first % size == 0 and all(first + i in there for i in range(size)):
            whole.append(list(range(first, first + size)))
    return whole


def _of_rank(config: dict[str, Any]) -> str:
    rank = config.get("dp_rank")
    return "" if rank is None else f"rank {rank} batch {config.get('batch_index')}"
