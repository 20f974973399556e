"""What the trainer knows, in a file: so it goes on where it was after every process was killed.

It is written after a batch was learnt and before the batch is acked. If everything is killed in between, the batch
comes again, and the count of rows says that it was learnt. Which rows are acked the stream knows.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import torch

from examples.multimodal_grpo.job import Job
from examples.multimodal_grpo.ledger import Ledger
from examples.multimodal_grpo.policy import Policy


class Saved:
    """The state of one trainer; nothing is kept where the job has no directory for it."""

    def __init__(
        self, job: Job, policy: Policy, optimizer: torch.optim.Optimizer, recent: deque[float], ledger: Ledger
    ) -> None:
        self._path = None if job.data_dir is None else Path(job.data_dir, "trainer")
        self._policy = policy
        self._optimizer = optimizer
        self._recent = recent
        self._ledger = ledger

    def load(self) -> int:
        """The number of the last update, 0 where there was none."""
        if self._path is None or not self._path.exists():
            return 0
        state = torch.load(self._path)
        self._policy.load_state_dict(state["policy"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._recent.extend(state["recent"])
        self._ledger.count(state["counted"])
        return int(state["number"])

    def save(self, number: int) -> None:
        """Keep all of it, as of this update; what was kept before is there until then."""
        if self._path is None:
            return
        state = {
            "number": number,
            "policy": self._policy.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "recent": list(self._recent),
            "counted": self._ledger.counted,
        }
        draft = self._path.with_suffix(".draft")
        torch.save(state, draft)
        draft.replace(self._path)
