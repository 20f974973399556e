"""What the processes do, on whichever host they run. The work itself is that of `examples.multimodal_grpo`.

When a host dies or is cut off, a call that needs it raises: `Retryable` while its partitions are led by nobody, `Lost`
for columns that were there. Both mean that this delivery comes to nothing, and the next will not: followers lead, and
rows whose columns died before they were trained on are named by `stream.lost()`, once, so that a rollout worker makes
them again. The first worker asks for them, since its host outlives the others. Only where a process's own node has gone
is there nothing to go on with.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

import dataplane as dp
from examples.multimodal_grpo import reward
from examples.multimodal_grpo.job import Finished, Job
from examples.multimodal_grpo.ledger import Ledger

STREAM = "rollouts"


class Board(Protocol):
    """Where the newest weights are pinned up."""

    def post(self, version: int, weights: dp.BatchRef) -> None: ...
    def read(self) -> tuple[int, dp.BatchRef] | None: ...


class Reports(Protocol):
    """The way to whoever watches the job."""

    def send(self, report: Any, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Appended:
    """An append of rows with these keys has returned."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Counted:
    """The keys of all rows that the trainer has acked, each as often as it was."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Named:
    """The stream has named the rows of these keys as lost."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Over:
    """The first rollout worker has seen the stream's end: it reports no more."""


@dataclass(frozen=True, slots=True)
class MadeAgain:
    """A rollout worker has made these prompts' rows again, which were lost."""

    worker: int
    groups: tuple[str, ...]


def roll_out(
    reports: Reports, job: Job, address: str, worker: int, life: int, pictures: dp.BatchRef, board: Board
) -> None:
    """Append batches until the stream is closed, which raises Closed. The first worker makes what was lost first."""
    try:
        _roll_out(reports, job, address, worker, life, pictures, board)
    except dp.Closed:
        if worker == 0:
            reports.send(Over())
        raise


def _roll_out(
    reports: Reports, job: Job, address: str, worker: int, life: int, pictures: dp.BatchRef, board: Board
) -> None:
    import torch

    from examples.multimodal_grpo.policy import Policy
    from examples.multimodal_grpo.rollout import put_prompts, put_responses, refresh

    torch.set_num_threads(1)
    rng = np.random.default_rng([job.seed, worker, life])
    torch.manual_seed(int(rng.integers(1 << 32)))
    policy, version = Policy(job.seed), 0
    lost: list[str] = []
    with dp.connect(address) as plane:
        rollouts = plane.stream(STREAM)
        for batch in itertools.count():
            with going_on(plane):
                lost += named(reports, rollouts) if worker == 0 else []
                again = lost[: job.prompts]
                groups = again or [f"{worker}.{life}/{batch * job.prompts + i}" for i in range(job.prompts)]
                version = refresh(plane, policy, version, board)
                chosen = pictures[[picture_of(group, len(pictures)) for group in groups]]
                prompts = put_prompts(plane, job, plane.get(chosen), rng)
                rows = prompts.repeat(job.responses).union(put_responses(plane, job, policy, prompts))
                reports.send(Appended(append(plane, rollouts, rows, groups, version)))
                lost = lost[job.prompts :]
                if again:
                    reports.send(MadeAgain(worker, tuple(again)))
            time.sleep(job.pauses[worker])


def named(reports: Reports, rollouts: dp.Stream) -> list[str]:
    """The prompts of rows that were lost, by the names that they are made again under."""
    rows = rollouts.lost("actor")
    if rows:
        reports.send(Named(tuple(str(row.key) for row in rows)))
    return sorted({f"{row.group}+" for row in rows})


def picture_of(group: str, pictures: int) -> int:
    """The picture that a prompt shows: its name says so, whoever makes it, and as often as it is made."""
    return zlib.crc32(group.rstrip("+").encode()) % pictures


def append(plane: dp.Plane, rollouts: dp.Stream, rows: dp.BatchRef, groups: list[str], version: int) -> tuple[str, ...]:
    """Append the rows of these prompts; their keys, which make it one append, however often it is made."""
    responses = len(rows) // len(groups)
    keys = [f"{group}/{i}" for group in groups for i in range(responses)]
    named = [group for group in groups for _ in range(responses)]
    while True:
        try:
            rollouts.append(rows, keys=keys, group=named, version=version)
            return tuple(keys)
        except (dp.Retryable, dp.OutcomeUnknown):
            plane.stats()  # raises where it is this host's node that has gone


def verify(reports: Reports, job: Job, address: str) -> None:
    """Reward rows until the stream is closed and drained, which raises Closed.

    Groups are taken whole, so a host's death takes their rewards whole: of a group that lacked some for ever the other
    rows would stay, and by `max_lag` keep newer ones out.
    """
    how = {"rows": reward.ROWS, "sampler": dp.CompleteGroups(job.responses)}
    with dp.connect(address) as plane:
        rollouts = plane.stream(STREAM)
        while True:
            with (
                going_on(plane),
                rollouts.consume("reward", **how, columns=["response_ids", "answer"]) as delivery,
            ):
                batch = delivery.get()
                rewards = reward.verify(batch["response_ids"].to_list(), batch["answer"].to_list())
                rollouts.extend(delivery.ref, {"reward": rewards})


def train(reports: Reports, job: Job, address: str, seconds: float, held_out: dp.BatchRef, board: Board) -> None:
    """Train until the target is reached, steps or time are over, or the stream is closed; then examine the policy."""
    from examples.multimodal_grpo import trainer
    from examples.multimodal_grpo.ranks import Ranks

    policy, optimizer = trainer.learner(job)
    alone = Ranks(job, 0, "")
    published: dp.BatchRef | None = None
    recent: deque[float] = deque(maxlen=job.averaged)
    ledger, deadline, number = Ledger(), time.monotonic() + seconds, 0
    rows, columns = job.prompts * job.responses, [*trainer.PROMPT_COLUMNS, *trainer.RESPONSE_COLUMNS]
    how = {"rows": rows, "min_rows": rows, "columns": columns, "sampler": dp.CompleteGroups(job.responses)}
    with dp.connect(address) as plane:
        rollouts = plane.stream(STREAM)
        while not (
            number == job.steps
            or time.monotonic() > deadline
            or (len(recent) == job.averaged and np.mean(recent) >= job.target)
        ):
            with going_on(plane, closed=True) as going:
                with rollouts.consume("actor", timeout=deadline - time.monotonic(), **how) as delivery:
                    mean = trainer.update(job, policy, optimizer, plane.get(delivery.ref), alone)
                    ack(delivery)
                recent.append(mean)
                number += 1  # only now is it acked, and counts
                ledger.count(delivery.keys)
                reports.send(trainer.report(job, number, delivery, recent))
                published = trainer.publish(plane, policy, number, board, published)
            if going.closed:
                break
        rollouts.close()
        trainer.count_the_rest(job, rollouts, ledger)
        reports.send(Counted(tuple(ledger.counted)))
        average, accuracy = float(np.mean(recent or [0.0])), trainer.examine(plane, job, policy, held_out)
        reports.send(Finished(average, accuracy, len(held_out), ledger.books(rollouts.stats())))


def ack(delivery: dp.Delivery) -> None:
    """Ack, and again while it is not known whether it counts. Raises LeaseExpired where it does not."""
    while True:
        try:
            return delivery.ack()
        except dp.OutcomeUnknown:
            continue


class going_on:
    """A block that comes to nothing when another host dies in the middle of it: go on with the next. `closed`: also
    when the stream is at its end, which it says then."""

    def __init__(self, plane: dp.Plane, *, closed: bool = False) -> None:
        self._plane = plane
        self._ends = closed
        self.closed = False

    def __enter__(self) -> going_on:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if self._ends and kind is not None and issubclass(kind, dp.Closed):
            self.closed = True
            return True
        if kind is None or not issubclass(kind, dp.Retryable | dp.Lost | dp.LeaseExpired | dp.OutcomeUnknown):
            return False
        self._plane.stats()  # raises where it is this host's node that has gone
        return True
