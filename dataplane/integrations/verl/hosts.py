"""Runs work on the hosts of a Ray job: a task on the Ray node whose plane node has the data that the task needs.

Invariants: a job of one host runs its work in this process; each piece of work has its own outcome, independent of
the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from dataplane.errors import DataplaneError, PeerUnavailable
from dataplane.integrations import process

#: The node of the plane that is best suited, or None; what to call; with what.
Job = tuple[bytes | None, Callable[..., Any], tuple[Any, ...]]


def each_host(jobs: Sequence[Job]) -> list[Any]:
    """The results of the jobs, or the exceptions that they raised, in order. Each runs where its node is; jobs
    without a node run on all hosts in turn. Raises PeerUnavailable, before any begins, if a host does not answer."""
    places = _places() if len(jobs) > 1 else {}
    if len(places) < 2:
        return [_run(work, arguments) for _, work, arguments in jobs]
    every = list(places.values())
    started = []
    for number, (node, work, arguments) in enumerate(jobs):
        place = every[number % len(every)] if node is None else places.get(node, every[0])
        started.append(_task(_run, place).remote(work, arguments))
    return [_outcome(each) for each in started]


def results(outcomes: Sequence[Any]) -> list[Any]:
    """The results; raises the first exception among them."""
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return list(outcomes)


def _run(work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return work(*arguments)
    except (DataplaneError, OSError) as error:
        return error


def _task(work: Callable[..., Any], place: str) -> Any:
    """A Ray task on this Ray node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    on = NodeAffinitySchedulingStrategy(place, soft=False)
    return ray.remote(num_cpus=0, max_retries=0)(work).options(scheduling_strategy=on)


def _outcome(started: Any) -> Any:
    import ray
    from ray.exceptions import RayError

    try:
        return ray.get(started)
    except RayError as error:
        return PeerUnavailable(f"work on a Ray node did not end well: {error}", address="ray")


def _places() -> dict[bytes, str]:
    """The Ray node of each node of the plane; empty without Ray, or with a single Ray node."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return {}
    alive = [each["NodeID"] for each in ray.nodes() if each["Alive"]]
    if len(alive) < 2:
        return {}
    found = results([_outcome(started) for started in [_task(_node_here, name).remote() for name in alive]])
    return dict(zip(found, alive, strict=True))


def _node_here() -> bytes:
    return bytes.fromhex(process.plane().stats().node)
