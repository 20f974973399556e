"""What the job is set to, and what its processes tell the one that watches them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """The settings. Each process gets them as they are."""

    # The plane: less memory than the stream may hold, so that some of it goes to disk.
    memory: str = "64MiB"
    spill: str = "2GiB"
    spill_dir: str | None = None

    # The stream: who appends more waits for the trainer.
    in_flight: str = "96MiB"
    max_lag: int = 16  # policy versions between the oldest row that is not used and the next that is appended

    # What outlives everything: where the node keeps the stream, and the trainer its state; and how often it was started
    # there before.
    data_dir: str | None = None
    life: int = 0

    # The rollouts.
    pauses: tuple[float, ...] = (0.0, 0.1, 0.4)  # seconds that each worker rests after a batch: some are slower
    prompts: int = 32  # a batch
    responses: int = 8  # a prompt: a group
    smallest: int = 112  # an image's sides, in pixels
    largest: int = 168

    # The accident: at this step, this rollout worker is killed, and started again.
    kill_at: int = 40
    killed: int = 1

    # The trainer.
    ranks: int = 1  # processes that learn together, each from its share of a batch

    # GRPO.
    learning_rate: float = 1.5e-3
    clip: float = 0.2
    entropy: float = 0.01

    # The end: the mean reward of so many batches has reached the target; or so many steps or seconds are over.
    target: float = 0.9
    averaged: int = 20
    steps: int | None = None
    seconds: float = 110.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """The trainer made an update."""

    number: int
    reward: float  # mean of the batch
    average: float  # mean of the last batches
    lag: float  # updates between the policy that answered and the one that was updated
    rows: int
    logical_bytes: int  # what the batch would be with each row's own copy of everything
    stored_bytes: int
    reference_bytes: int  # what the trainer was sent


@dataclass(frozen=True, slots=True)
class Killed:
    """A process was killed, and started again."""

    process: str
    step: int


@dataclass(frozen=True, slots=True)
class Books:
    """What was appended to the stream in all lives, and what the trainer counted of it."""

    appended: int
    counted: dict[str, int]  # distinct rows, by the worker and life that made them
    again: int  # rows that were counted though they had been before
    left_out: int  # rows that were appended and never went to the trainer

    @property
    def exact(self) -> bool:
        """Whether each row that was appended was counted once, or is known to have been left out."""
        return not self.again and self.appended == sum(self.counted.values()) + self.left_out


@dataclass(frozen=True, slots=True)
class Finished:
    """The trainer has ended, and examined the policy on digits that it had never seen."""

    average: float
    accuracy: float
    examined: int
    books: Books


@dataclass(frozen=True, slots=True)
class Failed:
    """A process ended with an error."""

    process: str
    error: str
