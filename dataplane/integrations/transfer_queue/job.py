"""The job of a process: jobs that share a node have separate partitions, settings and indexes.

A job is named by `init(job=...)`, by `$DATAPLANE_JOB`, or by Ray: all processes of a Ray job belong to one. `init()`
puts the name into the environment, which children inherit. Without a name, the first `init()` creates a job for its own
process and its children.

Invariants: two jobs share keys only if both were given the same name. A process that cannot determine its job is
refused: if it guessed, it could share the keys of another job, or share none with its own.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass

from dataplane.errors import Misuse
from dataplane.integrations import process

VARIABLE = "DATAPLANE_JOB"
"""The environment variable with the name."""

_UNNAMED, _RAY = "unnamed", "ray-"
_MOST = 128


@dataclass(frozen=True, slots=True)
class Job:
    """token: a secret of the processes of an unnamed job; empty for a named one."""

    name: str
    token: str = ""

    def export(self) -> None:
        """Let the children of this process join it."""
        os.environ[VARIABLE] = f"{self.name}:{self.token}" if self.token else self.name


def named(name: object) -> Job:
    """The job with this name. Raises ValueError for an invalid name."""
    if not isinstance(name, str) or not 0 < len(name) <= _MOST or set("/:") & set(name):
        raise ValueError(f"a job's name is a text of 1 to {_MOST} characters without '/' and ':', not {name!r}")
    return Job(name)


def known() -> Job | None:
    """The job of this process, as far as the environment and Ray say."""
    said, by_ray = os.environ.get(VARIABLE, ""), of_ray()
    if said and not (by_ray is not None and said.startswith(_RAY)):  # its Ray job may have ended
        name, _, token = said.partition(":")
        return Job(named(name).name, token)
    return by_ray


def of_ray() -> Job | None:
    """The job of all processes of this Ray job; None without Ray."""
    found = process.ray_job()
    if found is None:
        return None
    cluster, number = found
    return Job(f"{_RAY}{cluster.hex()[:12]}-{number.hex()}")


def new() -> Job:
    """An unnamed job."""
    return Job(_UNNAMED, secrets.token_hex(8))


def refuse(job: Job, address: str) -> Misuse:
    """The error for a process that belongs to another unnamed job than the one on its node."""
    return Misuse(
        f"the node at {address} has a job already that was given no name, and this process is none of its children: to"
        f" take part in it, or to be a job beside it, name the job in all of its processes, with init(job=...) or"
        f" {VARIABLE} in their environment. If that job has ended, its rows are those of init(job={job.name!r})"
    )
