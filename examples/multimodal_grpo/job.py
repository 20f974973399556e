"""The settings of the job, and the reports that its processes send to the main process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """The settings, the same in all processes."""

    # The node. The stream may hold more than this memory, so some of its rows go to disk.
    memory: str = "64MiB"
    spill: str = "2GiB"
    spill_dir: str | None = None

    # The limits of the stream. An append beyond them waits for the trainer.
    in_flight: str = "96MiB"
    max_lag: int = 16  # policy versions between the oldest unused row and a new one

    # The directory of the durable stream and of the trainer's state, and the number of earlier starts there.
    data_dir: str | None = None
    life: int = 0

    # The rollouts.
    pauses: tuple[float, ...] = (
        0.0,
        0.1,
        0.4,
    )  # seconds between two batches of each worker: the number of workers, and their speeds
    prompts: int = 32  # a batch
    responses: int = 8  # a prompt: a group
    smallest: int = 112  # an image's sides, in pixels
    largest: int = 168

    # The fault: at this step, this rollout worker is killed and started again.
    kill_at: int = 40
    killed: int = 1

    # The trainer.
    ranks: int = 1  # processes that train together, each on its share of a batch

    # GRPO.
    learning_rate: float = 1.5e-3
    clip: float = 0.2
    entropy: float = 0.01

    # The end: the mean reward of the last `averaged` batches has reached the target, or the steps or seconds are over.
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
    lag: float  # updates between generating and using the rows, on average
    rows: int
    logical_bytes: int  # of the batch if each row had its own copy of all columns
    stored_bytes: int
    reference_bytes: int  # sent to the trainer


@dataclass(frozen=True, slots=True)
class Killed:
    """A process was killed and started again."""

    process: str
    step: int


@dataclass(frozen=True, slots=True)
class Books:
    """The rows appended to the stream in all starts of the job, and those that the trainer counted."""

    appended: int
    counted: dict[str, int]  # distinct rows, by the worker and life that made them
    again: int  # rows that were counted twice
    left_out: int  # rows that were appended and not delivered to the trainer

    @property
    def exact(self) -> bool:
        """Whether each appended row was either counted once or left out."""
        return not self.again and self.appended == sum(self.counted.values()) + self.left_out


@dataclass(frozen=True, slots=True)
class Finished:
    """The trainer has ended, and has tested the policy on held-out digits."""

    average: float
    accuracy: float
    examined: int
    books: Books


@dataclass(frozen=True, slots=True)
class Failed:
    """A process ended with an error."""

    process: str
    error: str
