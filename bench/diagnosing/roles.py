"""The functions of the processes of the two pipelines. A line that a fault makes slow ends in `# fault: NAME`.

`grpo`: each worker appends rows of a group, a reward process extends them, and a trainer consumes whole groups.
`agent`: workers with tools append trajectories, a verifier scores them and appends them to a second stream, and a
learner consumes this stream. An archive may read the trajectories too. Processes sleep as long as real roles would
work, so that many share few processors.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np

import dataplane as dp

ROWS = 2
"""Rows that a worker appends at a time."""
TOKENS = 64
"""Tokens of a row, if all rows are alike."""


class Ballast:
    """A lock that another thread holds most of the time, like a logger's or a cache's."""

    def __init__(self, held_s: float) -> None:
        self.lock = threading.Lock()
        self._held_s = held_s
        threading.Thread(target=self._hold, daemon=True).start()

    def _hold(self) -> None:
        while self._held_s:
            with self.lock:
                time.sleep(self._held_s)
            time.sleep(0.002)


class Lengths:
    """The numbers of tokens of rows: all equal, or from a lognormal distribution with the same median and a long
    tail."""

    def __init__(self, seed: int, skewed: bool) -> None:
        self._random = random.Random(seed)
        self._skewed = skewed

    def next(self) -> int:
        """The tokens of the next row."""
        return min(16 * TOKENS, int(self._random.lognormvariate(np.log(TOKENS), 1.4))) if self._skewed else TOKENS


def generate(tokens: int, s_a_token: float) -> np.ndarray[Any, Any]:
    """Generate a response of this many tokens."""
    time.sleep(tokens * s_a_token)  # fault: skew # fault: straggler # fault: host
    return np.arange(tokens)


def call_tool(draw: random.Random, tail: bool) -> None:
    """Call a tool. With `tail`, a fifth of the calls take 1.5 s."""
    seconds = 1.5 if tail and draw.random() < 0.2 else 0.004
    time.sleep(seconds)  # fault: tail


def score(rows: int, s_a_row: float) -> list[float]:
    """Compute the rewards of rows."""
    rewards = []
    for _ in range(rows):
        time.sleep(s_a_row)  # fault: reward
        rewards.append(1.0)
    return rewards


# grpo


def roll_out(address: str, job: dict[str, Any], worker: int) -> None:
    """A worker of `grpo`: appends its rows of each group."""
    lengths, draw = Lengths(job["seed"] * 100 + worker, job["fault"] == "skew"), random.Random(job["seed"] + worker)
    slow = job["slow"].get(str(worker), 1.0)
    with dp.connect(address) as plane:
        stream = plane.stream("rollouts")
        count = ROWS * job["workers"] if job["tight"] else ROWS  # whole groups, if the budget holds only one
        for step in range(1 << 30):
            tokens = [lengths.next() for _ in range(count)]
            generate(max(tokens), slow * job["rollout_s"] / TOKENS)
            call_tool(draw, job["fault"] == "tail")
            ids = [np.zeros(length, np.int64) for length in tokens]
            rows = {"ids": ids, "image": np.zeros((count, job["nbytes"] // ROWS), np.uint8)}
            group = f"{step}-{worker}" if job["tight"] else step
            stream.append(rows, group=group, version=step)  # fault: budget # fault: disk # fault: limit


def reward(address: str, job: dict[str, Any], worker: int) -> None:
    """The reward process of `grpo`: scores rows, and shares a lock with another thread."""
    ballast = Ballast(job["lock_s"])
    slow = job["slow"].get("reward", 1.0)
    with dp.connect(address) as plane:
        stream = plane.stream("rollouts")
        for delivery in stream.deliveries("reward", rows=ROWS * job["workers"], columns=["ids"]):
            rows = delivery.get()
            rewards = score(len(rows["ids"]), slow * job["reward_s"])
            with ballast.lock:  # fault: lock
                pass
            stream.extend(delivery.ref, {"reward": rewards})  # fault: budget


def train(address: str, job: dict[str, Any], worker: int) -> None:
    """The trainer of `grpo`: a step for each whole group."""
    size = ROWS * job["workers"]
    with dp.connect(address) as plane:
        stream = plane.stream("rollouts")
        groups = dp.CompleteGroups(size)
        columns = ["ids", "image", "reward"]
        following = stream.deliveries("actor", rows=size, columns=columns, sampler=groups, prefetch=job["prefetch"])
        for delivery in following:  # fault: prefetch
            delivery.get()  # fault: link # fault: fetch # fault: disk
            time.sleep(job["train_s"])


def log_rows(address: str, job: dict[str, Any], worker: int) -> None:
    """The logger of `grpo`: holds all rows for `ack_s`."""
    with dp.connect(address) as plane:
        stream = plane.stream("rollouts")
        while True:
            with stream.consume("log", rows=ROWS * job["workers"], columns=["ids"]) as delivery:
                delivery.get()
                time.sleep(job["ack_s"])  # fault: ack


# agent


def act(address: str, job: dict[str, Any], worker: int) -> None:
    """A worker of `agent`: generates, calls a tool, and appends the trajectory."""
    lengths, draw = Lengths(job["seed"] * 100 + worker, job["fault"] == "skew"), random.Random(job["seed"] + worker)
    slow = job["slow"].get(str(worker), 1.0)
    with dp.connect(address) as plane:
        trajectories = plane.stream("trajectories")
        version = 0
        while True:
            tokens = lengths.next()
            ids = generate(tokens, slow * job["rollout_s"] / TOKENS)
            call_tool(draw, job["fault"] == "tail")
            row = {"ids": [ids], "image": np.zeros((1, job["nbytes"]), np.uint8)}
            trajectories.append(row, version=version)  # fault: budget # fault: disk # fault: limit
            version += 1


def verify(address: str, job: dict[str, Any], worker: int) -> None:
    """The verifier of `agent`: scores trajectories and passes them on."""
    ballast = Ballast(job["lock_s"])
    slow = job["slow"].get("reward", 1.0)
    with dp.connect(address) as plane:
        trajectories, scored = plane.stream("trajectories"), plane.stream("scored")
        for delivery in trajectories.deliveries("verify", rows=1, columns=["ids", "image"]):
            delivery.get()
            rewards = score(1, slow * job["reward_s"])
            with ballast.lock:  # fault: lock
                pass
            keys = scored.append(delivery.ref)
            scored.extend(keys, {"reward": rewards})  # fault: budget


def learn(address: str, job: dict[str, Any], worker: int) -> None:
    """The learner of `agent`: a step for each trajectory."""
    with dp.connect(address) as plane:
        scored = plane.stream("scored")
        columns = ["reward", "image"]
        for delivery in scored.deliveries(
            "learner", rows=1, columns=columns, prefetch=job["prefetch"]
        ):  # fault: prefetch
            delivery.get()  # fault: link # fault: fetch # fault: disk
            time.sleep(job["train_s"])


def archive(address: str, job: dict[str, Any], worker: int) -> None:
    """The archive of `agent`: holds each trajectory for `ack_s`."""
    with dp.connect(address) as plane:
        trajectories = plane.stream("trajectories")
        while True:
            delivery = trajectories.consume("archive", rows=1, columns=["ids"])
            delivery.get()
            time.sleep(job["ack_s"])  # fault: ack
            delivery.ack()
