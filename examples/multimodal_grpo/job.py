"""What the job is set to, and what its processes tell the one that watches them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """The settings. Each process gets them as they are."""

    # The plane: less memory than `wire_depth` batches on each wire need, so that some of them go to disk.
    memory: str = "64MiB"
    spill: str = "2GiB"
    spill_dir: str | None = None

    # The rollouts.
    rollout_workers: int = 2
    prompts: int = 32  # a batch
    responses: int = 8  # a prompt: a group
    smallest: int = 112  # an image's sides, in pixels
    largest: int = 168
    wire_depth: int = 2  # references that lie on a wire and wait to be taken

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


@dataclass(frozen=True, slots=True)
class Finished:
    """The trainer has ended, and examined the policy on digits that it had never seen."""

    average: float
    accuracy: float
    examined: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A process ended with an error."""

    process: str
    error: str
