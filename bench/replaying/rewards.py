"""The reward stage: adds each row's reward its seconds after the row's delivery. Any number of rows may be in work."""

from __future__ import annotations

import asyncio
import time
from multiprocessing.connection import Connection

import numpy as np

import dataplane as dp
from bench.replaying import payloads
from bench.replaying.plan import Plan
from bench.replaying.rollouts import PATIENCE_S
from bench.replaying.telling import Did, Ended, Ready, Spent

_NAME = "reward"
_ROWS = 64  # a delivery
_READS = ("response_ids", "log_probs")


def work(plan: Plan, address: str, pipe: Connection) -> None:
    """The main function of the process."""
    asyncio.run(_work(plan, address, pipe))


async def _work(plan: Plan, address: str, pipe: Connection) -> None:
    spent = Spent()
    async with dp.aio.connect(address) as plane:
        stream = await plane.stream("replay")
        pipe.send(Ready(_NAME))
        async with asyncio.TaskGroup() as judging:
            while True:
                try:
                    with spent.on("rows"):
                        delivery = await stream.consume(
                            _NAME, rows=_ROWS, columns=["row", "sums", *_READS], lease=PATIENCE_S, timeout=PATIENCE_S
                        )
                except dp.Closed:
                    break
                judging.create_task(_judge(plan, stream, delivery, spent, pipe))
    pipe.send(Ended(_NAME, spent.told()))


async def _judge(
    plan: Plan, stream: dp.aio.AsyncStream, delivery: dp.aio.Delivery, spent: Spent, pipe: Connection
) -> None:
    """Check the rows, and add each reward after its seconds; rewards of the same time are added together."""
    began = time.monotonic()
    with spent.on("bytes"):
        batch = await delivery.get(timeout=PATIENCE_S)
    with spent.on("check"):
        spent.read += payloads.check(batch, _READS)
    rows = batch["row"].numpy().copy()
    del batch  # no bytes are pinned during the waits
    seconds = plan.reward_s[rows]
    for each in np.unique(seconds):
        of = np.flatnonzero(seconds == each)
        now = time.monotonic()
        await asyncio.sleep(max(0.0, began + float(each) - now))
        spent.paused(began + float(each) - now, now)
        with spent.on("room"):
            rewards = np.array([payloads.reward_of(int(row)) for row in rows[of]], np.float32)
            await stream.extend(delivery.ref[of], {"reward": rewards}, timeout=PATIENCE_S)
        spent.written += rewards.nbytes
        pipe.send(Did(_NAME, _NAME, rows[of].tolist(), began, time.monotonic()))
    await delivery.ack()
