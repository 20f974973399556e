"""The job on three hosts, whatever they are made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import dataplane as dp
from examples.multi_host import stages
from examples.multi_host.view import Figures, View
from examples.multimodal_grpo import digits
from examples.multimodal_grpo.crew import GRACE_S, LOOK_S, TRAINED_ON
from examples.multimodal_grpo.job import Failed, Finished, Job, Step

HOSTS = ("a", "b", "c")
VICTIM = 1
MANY = 200  # deliveries of a row, while a host that has its columns may be dead or not


class Cluster(Protocol):
    """Hosts on which processes are started. `plane` is the first host's, `board` can be handed to processes."""

    plane: dp.Plane
    board: Any

    def address(self, host: int) -> str: ...
    def start(self, host: int, name: str, target: Callable[..., None], *args: Any) -> None: ...
    def reports(self, wait_s: float) -> Iterator[Any]: ...
    def figures(self) -> Sequence[Figures]: ...
    def kill(self, host: int) -> None: ...


def run(job: Job, cluster: Cluster, view: View, *, kill_at: int | None) -> None:
    """Run the job; `view` has seen all of it afterwards. `kill_at`: the step at which host b dies.

    Raises DataplaneError where the first host's node fails.
    """
    plane = cluster.plane
    pictures = plane.put(digits.load(job.seed))
    limits: dict[str, Any] = {"max_bytes": job.in_flight, "max_lag": job.max_lag, "max_deliveries": MANY}
    rollouts = plane.stream(stages.STREAM, tasks=["reward", "actor"], **limits)
    learn, examine = pictures[:TRAINED_ON], pictures[TRAINED_ON:]

    cluster.start(0, "trainer", stages.train, job, cluster.address(0), job.seconds, examine, cluster.board)
    for worker in range(len(job.pauses)):
        there = cluster.address(worker)
        cluster.start(worker, f"rollout {worker}", stages.roll_out, job, there, worker, learn, cluster.board)
    cluster.start(2, "reward", stages.verify, job, cluster.address(2))
    view.say("trainer and rollout 0 on host a, rollout 1 on host b, reward on host c")
    deadline = time.monotonic() + job.seconds + GRACE_S
    try:
        while time.monotonic() < deadline:
            view.figures(cluster.figures(), _figures(rollouts))
            for report in cluster.reports(LOOK_S):
                view.report(report)
                if isinstance(report, Finished | Failed):
                    view.figures(cluster.figures(), None)
                    return
                if isinstance(report, Step) and report.number == kill_at:
                    cluster.kill(VICTIM)
                    view.say(f"host {HOSTS[VICTIM]} is killed, with its node and all that runs there")
        view.report(Failed("job", f"not over {GRACE_S:.0f} s after its time"))
    finally:
        rollouts.drop()


def _figures(rollouts: dp.Stream) -> Any:
    """The stream's, or None while nobody knows yet whether a host has died."""
    try:
        return rollouts.stats()
    except dp.PeerUnavailable:
        return None
