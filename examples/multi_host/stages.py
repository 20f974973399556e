"""The stages of the job: rollout, reward and trainer. Their functions are those of `examples.multimodal_grpo`.

When another host dies or is cut off, a call that needs it raises: `Retryable` until its partitions have new leaders,
`Lost` for columns that it stored. Then the stage gives up the delivery and takes the next one (`going_on`). If the node
of its own host dies, the stage fails.

Rows whose columns are lost before the trainer acks them are reported by `stream.lost()`, once. The first rollout worker
makes them again, since its host is never killed.
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
    """A place for the reference of the newest weights."""

    def post(self, version: int, weights: dp.BatchRef) -> None: ...
    def read(self) -> tuple[int, dp.BatchRef] | None: ...


class Reports(Protocol):
    """A channel to the main process."""

    def send(self, report: Any, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Appended:
    """An append of rows with these keys has returned."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Counted:
    """The keys of all rows that the trainer has acked, repeated for repeated acks."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Named:
    """The stream has reported the rows with these keys as lost."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Over:
    """The first rollout worker has ended: it reports no more lost rows."""


@dataclass(frozen=True, slots=True)
class MadeAgain:
    """A rollout worker has made the rows of these prompts again."""

    worker: int
    groups: tuple[str, ...]


def roll_out(
    reports: Reports, job: Job, address: str, worker: int, life: int, pictures: dp.BatchRef, board: Board
) -> None:
    """Append batches; in the first worker, lost rows before new ones. Raises Closed when the stream is closed."""
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
    """Report lost rows. Returns new names of their prompts: the old ones and a `+`."""
    rows = rollouts.lost("actor")
    if rows:
        reports.send(Named(tuple(str(row.key) for row in rows)))
    return sorted({f"{row.group}+" for row in rows})


def picture_of(group: str, pictures: int) -> int:
    """The number of a prompt's picture. A prompt that is made again has the same picture."""
    return zlib.crc32(group.rstrip("+").encode()) % pictures


def append(plane: dp.Plane, rollouts: dp.Stream, rows: dp.BatchRef, groups: list[str], version: int) -> tuple[str, ...]:
    """Append the rows of these prompts, and repeat after Retryable and OutcomeUnknown. Returns their keys, by which
    a repeated append adds no row twice."""
    responses = len(rows) // len(groups)
    keys = [f"{group}/{i}" for group in groups for i in range(responses)]
    named = [group for group in groups for _ in range(responses)]
    while True:
        try:
            rollouts.append(rows, keys=keys, group=named, version=version)
            return tuple(keys)
        except (dp.Retryable, dp.OutcomeUnknown):
            plane.stats()  # raises if this host's node has died


def verify(reports: Reports, job: Job, address: str) -> None:
    """Reward rows. Raises Closed when the stream is closed and drained.

    Groups are rewarded whole, so the death of this host loses all rewards of a group or none. A group without some of
    its rewards would never be complete: its rows would stay, and by `max_lag` block newer ones.
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
    """Train until the target is reached, steps or seconds are over, or the stream is closed. Then close the stream,
    count its remaining rows, test the policy on `held_out`, and report."""
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
                number += 1  # an update counts once its rows are acked
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
    """Ack, and repeat while the outcome is unknown. Raises LeaseExpired if the lease has ended."""
    while True:
        try:
            return delivery.ack()
        except dp.OutcomeUnknown:
            continue


class going_on:
    """A block from which errors by the death of another host are suppressed; those of this host's node are raised.
    closed: suppress Closed, too, and set the attribute `closed` then."""

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
        self._plane.stats()  # raises if this host's node has died
        return True
