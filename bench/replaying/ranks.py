"""The ranks of the reference and of the trainer. Tensor-parallel ranks read and check the same rows.

The reference consumes rows as they arrive: each data-parallel rank is a member of the task, and its tensor-parallel
ranks are the replicas of this member. The trainer consumes an update at a time: all of its ranks are replicas of one
member. So each gets a reference to the whole update, splits it by tokens like the others, and reads its own share.

Invariants: the columns of `Plan.micro` rows are read at a time, and released before the next. The wait instead of
computing begins when the bytes are read, and includes their check.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np

import dataplane as dp
from bench.replaying import payloads
from bench.replaying.plan import Plan
from bench.replaying.rollouts import PATIENCE_S
from bench.replaying.telling import Did, Ended, Ready, Spent

BROUGHT = ("reward", "ref_log_probs")


def reference(plan: Plan, address: str, dp_rank: int, tp_rank: int, pipe: Connection) -> None:
    """The main function of a rank of the reference."""
    name, spent = f"reference {dp_rank}.{tp_rank}", Spent()
    columns = ["row", "sums", *plan.columns]
    how: dict[str, Any] = {"member": f"dp{dp_rank}", "replica": tp_rank, "replicas": plan.reference.tp}
    how |= {"rows": plan.delivered, "columns": columns, "lease": PATIENCE_S, "timeout": PATIENCE_S}
    with dp.connect(address) as plane:
        stream = plane.stream("replay")
        pipe.send(Ready(name))
        for delivery in _deliveries(lambda: stream.consume("reference", **how), spent):
            began = time.monotonic()
            rows = _compute(plan, plane, delivery.ref, plan.reference_token_s, spent, also=None)
            if tp_rank == 0:
                with spent.on("room"):
                    lengths = plan.response_tokens[rows].tolist()
                    made = [payloads.reference_of(row, n) for row, n in zip(rows, lengths, strict=True)]
                    stream.extend(delivery.ref, {"ref_log_probs": made}, timeout=PATIENCE_S)
                spent.written += sum(each.nbytes for each in made)
            pipe.send(Did(name, "reference", rows, began, time.monotonic()))
            delivery.ack()
    pipe.send(Ended(name, spent.told()))


def train(plan: Plan, address: str, dp_rank: int, tp_rank: int, pipe: Connection, together: Barrier) -> None:
    """The main function of a rank of the trainer. together: the barrier of all ranks, before each ack."""
    name, spent = f"trainer {dp_rank}.{tp_rank}", Spent()
    within = dp.Freshest(plan.max_lag) if plan.max_lag else None
    how: dict[str, Any] = {"sampler": dp.TokenBalanced("input_ids", plan.trainer.dp, within=within)}
    how |= {"columns": ["row", "sums", *plan.columns, *BROUGHT], "lease": PATIENCE_S, "timeout": PATIENCE_S}
    how |= {"member": "all", "replica": dp_rank * plan.trainer.tp + tp_rank, "replicas": plan.trainer.count}
    update = 0

    def take() -> dp.Delivery:
        wanted = plan.wanted(update)
        return stream.consume("train", rows=wanted, min_rows=wanted, **how)

    with dp.connect(address) as plane:
        stream = plane.stream("replay")
        pipe.send(Ready(name))
        for delivery in _deliveries(take, spent):
            began = time.monotonic()
            share = delivery.split()[dp_rank]
            rows = _compute(plan, plane, share, plan.train_token_s, spent, also=payloads.check_stages)
            with spent.on("ranks"):
                together.wait(PATIENCE_S)
            delivery.ack()
            lag = update - float(np.mean(delivery.versions))
            pipe.send(Did(name, "train", rows, began, time.monotonic(), len(delivery), lag))
            update += 1
    pipe.send(Ended(name, spent.told()))


def _deliveries(consume: Callable[[], dp.Delivery], spent: Spent) -> Iterator[dp.Delivery]:
    """Yield deliveries until the task has done all rows."""
    while True:
        try:
            with spent.on("rows"):
                delivery = consume()
        except dp.Closed:
            return
        yield delivery


def _compute(
    plan: Plan,
    plane: dp.Plane,
    ref: dp.BatchRef,
    token_s: float,
    spent: Spent,
    also: Callable[[dp.Batch], None] | None,
) -> list[int]:
    """Read and check the rows, `micro` at a time, and wait for their time. Returns their numbers."""
    parts = [ref[at : at + plan.micro] for at in range(0, len(ref), plan.micro)]
    numbers: list[int] = []
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        with spent.on("bytes"):
            batch = plane.get(part, timeout=PATIENCE_S)
        there = time.monotonic()
        if following is not None:
            plane.prefetch(following)
        with spent.on("check"):
            spent.read += payloads.check(batch, plan.columns)
            if also is not None:
                also(batch)
        rows = batch["row"].to_list()
        del batch
        numbers += rows
        now = time.monotonic()
        seconds = there + int(plan.tokens[rows].sum()) * token_s - now
        time.sleep(max(0.0, seconds))
        spent.paused(seconds, now)
    return numbers
