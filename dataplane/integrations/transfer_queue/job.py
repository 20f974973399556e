"""Which job a process is of: jobs that share a node have partitions, settings and indexes of their own.

A job is named by `init(job=...)`, by `$DATAPLANE_JOB`, or by Ray: all processes of a Ray job are of one. `init()` puts
the name into the environment, which children inherit. Where nobody names it, the first `init()` makes a job that only
its own process and its children are of.

Invariants: two jobs share keys only where both were given one name. A process that can not tell whose job it is
of is refused, since to guess would be to share keys, or to be alone with its own.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass

from dataplane.errors import Misuse
from dataplane.integrations import process

VARIABLE = "DATAPLANE_JOB"
"""The name, in the environment."""

_UNNAMED, _RAY = "unnamed", "ray-"
_MOST = 128


@dataclass(frozen=True, slots=True)
class Job:
    """token: of a job that nobody named, what its own processes know; empty for one that was named."""

    name: str
    token: str = ""

    def export(self) -> None:
        """Let the children of this process be of it."""
        os.environ[VARIABLE] = f"{self.name}:{self.token}" if self.token else self.name


def named(name: object) -> Job:
    """The job of this name. Raises ValueError for what is no name."""
    if not isinstance(name, str) or not 0 < len(name) <= _MOST or set("/:") & set(name):
        raise ValueError(f"a job's name is a text of 1 to {_MOST} characters without '/' and ':', not {name!r}")
    return Job(name)


def known() -> Job | None:
    """That of this process, as far as the environment and Ray say."""
    said, by_ray = os.environ.get(VARIABLE, ""), of_ray()
    if said and not (by_ray is not None and said.startswith(_RAY)):  # which may be of a Ray job that has ended
        name, _, token = said.partition(":")
        return Job(named(name).name, token)
    return by_ray


def of_ray() -> Job | None:
    """The job that all processes of this Ray job are of; None without Ray."""
    found = process.ray_job()
    if found is None:
        return None
    cluster, number = found
    return Job(f"{_RAY}{cluster.hex()[:12]}-{number.hex()}")


def new() -> Job:
    """One that nobody named."""
    return Job(_UNNAMED, secrets.token_hex(8))


def refuse(job: Job, address: str) -> Misuse:
    """The error for a process that is of another unnamed job than the one that is on its node."""
    return Misuse(
        f"the node at {address} has a job already that was given no name, and this process is none of its children: to"
        f" take part in it, or to be a job beside it, name the job in all of its processes, with init(job=...) or"
        f" {VARIABLE} in their environment. If that job has ended, its rows are those of init(job={job.name!r})"
    )
