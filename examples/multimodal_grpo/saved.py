"""The state of the trainer in a file, from which it continues after all processes were killed.

The file is written after each update and before the ack of its batch. If all processes are killed in between, the batch
is delivered again; the saved count of rows shows that the policy was trained on it. The stream keeps the acks.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import torch

from examples.multimodal_grpo.job import Job
from examples.multimodal_grpo.ledger import Ledger
from examples.multimodal_grpo.policy import Policy


class Saved:
    """The state of one trainer. Nothing is saved if the job has no data directory."""

    def __init__(
        self, job: Job, policy: Policy, optimizer: torch.optim.Optimizer, recent: deque[float], ledger: Ledger
    ) -> None:
        self._path = None if job.data_dir is None else Path(job.data_dir, "trainer")
        self._policy = policy
        self._optimizer = optimizer
        self._recent = recent
        self._ledger = ledger

    def load(self) -> int:
        """Load the saved state. Returns the number of the last update; 0 if nothing was saved."""
        if self._path is None or not self._path.exists():
            return 0
        state = torch.load(self._path)
        self._policy.load_state_dict(state["policy"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._recent.extend(state["recent"])
        self._ledger.count(state["counted"])
        return int(state["number"])

    def save(self, number: int) -> None:
        """Save the state after this update. The file is replaced atomically."""
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
