"""The main process: starts the job on any kind of hosts, kills hosts, and shows reports."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import dataplane as dp
from examples.multi_host import stages
from examples.multi_host.view import Figures, View
from examples.multimodal_grpo import digits
from examples.multimodal_grpo.crew import GRACE_S, LOOK_S, TRAINED_ON
from examples.multimodal_grpo.job import Failed, Job

HOSTS = ("a", "b", "c")
START_S = 120.0  # limit of the start of processes, with imports, on a busy machine
REWARD = 2  # the host of the reward worker
MANY = 200  # deliveries of a row: reads fail until a silent host is known to be dead
Begin = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Accident:
    """An event on a host, described, and the updates and seconds until the next may occur."""

    said: str
    updates: int = 0
    seconds: float = 0.0


class Cluster(Protocol):
    """The hosts. `plane` is connected to the first host's node. `board` can be passed to processes."""

    plane: dp.Plane
    board: Any

    def address(self, host: int) -> str: ...
    def start(self, host: int, name: str, target: Callable[..., None], *args: Any) -> None: ...
    def reports(self, wait_s: float) -> Iterator[Any]: ...
    def figures(self) -> Sequence[Figures]: ...
    def accidents(self, begin: Begin) -> Iterator[Accident]: ...


def run(job: Job, cluster: Cluster, view: View, *, kill_at: int | None) -> None:
    """Run the job and report it to `view`; as `Failed` if a process fails or the time is over. kill_at: the update at
    which accidents begin, if any. The first host has none.

    Raises DataplaneError if the first host's node fails, and errors of `cluster`.
    """
    plane = cluster.plane
    pictures = plane.put(digits.load(job.seed))
    limits: dict[str, Any] = {"max_bytes": job.in_flight, "max_lag": job.max_lag, "max_deliveries": MANY}
    rollouts = plane.stream(stages.STREAM, tasks=["reward", "actor"], **limits)
    learn, examine = pictures[:TRAINED_ON], pictures[TRAINED_ON:]

    trained = job if kill_at is None else replace(job, steps=None, target=math.inf)  # until the stream is closed
    cluster.start(0, "trainer", stages.train, trained, cluster.address(0), job.seconds, examine, cluster.board)
    lives = [0] * len(HOSTS)

    def begin(host: int) -> None:
        """Start the rollout and reward workers of this host, in its next life."""
        there, life = cluster.address(host), lives[host]
        if host < len(job.pauses):
            what = (stages.roll_out, job, there, host, life, learn, cluster.board)
            cluster.start(host, f"rollout {host}", *what)
        if host == REWARD:
            cluster.start(host, "reward", stages.verify, job, there)
        lives[host] += 1

    for host in range(len(HOSTS)):
        begin(host)
    view.say("trainer and rollout 0 on host a, rollout 1 on host b, reward on host c")
    accidents = cluster.accidents(begin)
    at_update, at_time = (kill_at, 0.0) if kill_at is not None else (sys.maxsize, 0.0)
    deadline = time.monotonic() + START_S + job.seconds + GRACE_S  # the trainer's own time begins after its start
    try:
        while time.monotonic() < deadline and not view.over:
            known = time.monotonic() >= at_time  # until then a host is dead or silent, and `stats` would wait for it
            view.figures(cluster.figures(), _figures(rollouts) if known else None)
            for report in cluster.reports(LOOK_S):
                view.report(report)
            updates, now = len(view.steps), time.monotonic()
            if view.finished is None and updates >= at_update and now >= at_time:
                accident = next(accidents, None)
                if accident is None:
                    if view.enough:
                        rollouts.close()
                        at_update = sys.maxsize
                else:
                    view.say(accident.said)
                    at_update, at_time = updates + accident.updates, now + accident.seconds
        if not view.over:
            view.report(Failed("job", f"not over {START_S + GRACE_S:.0f} s after its time"))
        elif view.failed is None:
            view.report(stages.Named(tuple(str(row.key) for row in rollouts.lost("actor"))))
    finally:
        rollouts.drop()


def _figures(rollouts: dp.Stream) -> Any:
    """The stream's statistics; None while one of its hosts does not answer."""
    try:
        return rollouts.stats()
    except dp.PeerUnavailable:
        return None
