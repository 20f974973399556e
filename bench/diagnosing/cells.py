"""The fault matrix: runs jobs with one fault each, and diagnoses them while they run.

A cell is a pipeline, a fault and a seed. Its processes are forked from a server that has imported all their modules.
When `run` returns, its processes and nodes have ended.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import dataplane as dp
from bench import namespaces
from bench.diagnosing import roles
from dataplane.diagnosis.causes import Diagnosis
from dataplane.diagnosis.diagnosis import diagnosed
from dataplane.diagnosis.graph import GraphRun, between

CONTEXT = multiprocessing.get_context("forkserver")


def preload() -> None:
    """Let the fork server, of which a process has one, import the modules of jobs. To be called first, in a process
    that only runs cells."""
    CONTEXT.set_forkserver_preload(["dataplane.client.sync", "numpy", "pyarrow", "bench.diagnosing.roles"])


PIPELINES = ("grpo", "agent")
WARM_STEPS = 6
START_S = 60.0
STARVED = 1 / 3
"""The share of a step that waits for processors of other jobs, from which a fault is not the bottleneck and its cell
does not count."""
MIB = 1 << 20


@dataclass(frozen=True)
class Fault:
    """A planted fault, and the cause that must come first: one of `kinds`, at a line with the mark `at`, of one of
    `roles` (empty: any). `job`, `node`: changed settings."""

    name: str
    kinds: tuple[str, ...]
    at: str
    roles: tuple[str, ...] = ()
    job: dict[str, Any] = field(default_factory=dict)
    node: dict[str, str] = field(default_factory=dict)
    hosts: int = 1
    network: str = ""
    window_s: float = 0.0
    environment: dict[str, str] = field(default_factory=dict)
    command: str = "dataplane.cli"


BIG = 3 * MIB // 2
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("reward", ("code",), "reward", ("reward", "verify"), {"reward_x": 8}),
        Fault(
            "disk",
            ("disk",),
            "disk",
            job={"nbytes": BIG, "limits": 24},
            node={"--memory": "12MiB", "--spill": "4GiB"},
            environment={"SLOWED_DISK_S": "0.1"},
            command="bench.diagnosing.slowed",
        ),
        Fault("budget", ("budget",), "budget", job={"nbytes": BIG, "tight": True}),
        Fault("skew", ("skew",), "skew", ("roll_out", "act"), {"fault": "skew"}),
        Fault("straggler", ("straggler",), "straggler", ("roll_out", "act"), {"slow": {"1": 8.0}}, window_s=9.0),
        Fault("lock", ("lock",), "lock", ("reward", "verify"), {"lock_s": 0.3}),
        Fault("tail", ("tail",), "tail", ("roll_out", "act"), {"fault": "tail"}),
        Fault("ack", ("ack",), "ack", ("log", "archive"), {"ack_s": 0.35, "limits": 8}),
        Fault("link", ("link",), "link", ("actor", "learner"), {"nbytes": BIG}, hosts=2, network="60mbit"),
        Fault(
            "host", ("host",), "host", ("roll_out", "act"), {"slow_host": 5.0, "workers_x": 2}, hosts=2, window_s=9.0
        ),
        Fault(
            "prefetch",
            ("prefetch",),
            "fetch",
            ("actor", "learner"),
            {"nbytes": BIG, "prefetch": 0},
            hosts=2,
            network="400mbit",
        ),
        Fault("none", (), ""),
    )
}

USUAL: dict[str, dict[str, Any]] = {
    "grpo": {"workers": 3, "rollout_s": 0.05, "reward_s": 0.005, "train_s": 0.12, "limits": 8},
    "agent": {"workers": 2, "rollout_s": 0.18, "reward_s": 0.05, "train_s": 0.12, "limits": 64},
}
for _usual in USUAL.values():
    _usual |= {
        "lock_s": 0.0,
        "ack_s": 0.0,
        "nbytes": 4096,
        "prefetch": 1,
        "slow": {},
        "fault": "",
        "reward_x": 1,
        "tight": False,
        "workers_x": 1,
    }


@dataclass
class Cell:
    """The result of one cell, which took `after_s` seconds."""

    pipeline: str
    fault: Fault
    seed: int
    found: Diagnosis
    run: GraphRun
    after_s: float

    @property
    def first(self) -> str:
        """The first cause in one line of text."""
        if not self.found.causes:
            return "nothing"
        cause, short = self.found.causes[0], self.short
        told = f"{cause.kind} {cause.role} {cause.function}:{cause.line} {cause.share:.0%}"
        return f"{told}; crowded {short:.0%}" if short else told

    @property
    def short(self) -> float:
        """The share of a step that waits for processors of other jobs."""
        return sum(crowded.share for crowded in self.found.crowded)

    @property
    def starved(self) -> bool:
        """Whether other jobs left too few processors for the fault to show."""
        return self.short >= STARVED

    @property
    def named(self) -> bool:
        """Whether the planted cause is first or, without a fault, no cause costs more than 5 % of a step."""
        if not self.fault.kinds:
            return all(cause.share <= 0.05 for cause in self.found.causes)
        if not self.found.causes:
            return False
        cause = self.found.causes[0]
        return cause.kind in self.fault.kinds and (not self.fault.roles or cause.role in self.fault.roles)

    @property
    def line(self) -> bool:
        """Whether the first cause is at a marked line."""
        return bool(self.found.causes) and self.found.causes[0].line in lines_of(self.fault.at)


def lines_of(mark: str) -> set[int]:
    """The lines of the module `roles` with this mark."""
    lines = Path(roles.__file__).read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if f"# fault: {mark}" in line}


def run(pipeline: str, fault: Fault, seed: int, seconds: float = 6.0, *, vary: bool = False, **job: Any) -> Cell:
    """Run a job with a fault, and diagnose it for `seconds` after `WARM_STEPS` steps. `vary`: see `varied`. Raises
    TimeoutError if the job does not begin."""
    began = time.monotonic()
    asked = USUAL[pipeline] | {"seed": seed} | fault.job | job
    if vary:
        asked = varied(asked, seed)
    asked["reward_s"] *= asked["reward_x"]
    asked["workers"] *= asked["workers_x"]
    if pipeline == "agent":
        asked["rollout_s"] *= asked["workers_x"]
    if asked["tight"]:  # the memory of one step, and little more
        budget = (1 if pipeline == "agent" else asked["workers"]) * asked["nbytes"] + MIB // 2
        fault = replace(fault, node={"--memory": str(budget)})
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dpd", dir="/tmp")))
        addresses = stack.enter_context(_nodes(fault, directory))
        plane = stack.enter_context(dp.connect(addresses[0]))
        stack.enter_context(_processes(pipeline, asked, addresses))
        last = "actor" if pipeline == "grpo" else "learner"
        stream = plane.stream("rollouts" if pipeline == "grpo" else "scored")
        rows = roles.ROWS * asked["workers"] if pipeline == "grpo" else 1
        _until(lambda: stream.stats()["task"][last]["acked"] >= WARM_STEPS * rows)
        time.sleep(1.2)  # until the next reports have arrived
        seconds = fault.window_s or seconds
        before = plane.graphs()
        time.sleep(seconds)
        measured = between(before, plane.graphs(), seconds)
        found = diagnosed(measured)
    return Cell(pipeline, fault, seed, found, measured, time.monotonic() - began)


def varied(job: dict[str, Any], seed: int) -> dict[str, Any]:
    """The job with other times and another size of the fault, drawn from the seed. No setting was tuned for these
    values."""
    draw = random.Random(seed)
    changed = {name: job[name] * draw.uniform(0.75, 1.33) for name in ("rollout_s", "reward_s", "train_s")}
    changed |= {name: job[name] * draw.uniform(0.8, 1.5) for name in ("lock_s", "ack_s")}
    if job["reward_x"] != 1:
        changed["reward_x"] = job["reward_x"] * draw.uniform(0.8, 1.5)
    slow = draw.uniform(0.7, 1.5)
    changed["slow"] = {worker: times * slow for worker, times in job["slow"].items()}
    return job | changed


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the job did not begin in {START_S:.0f} s")
        time.sleep(0.1)


@contextmanager
def _nodes(fault: Fault, directory: Path) -> Iterator[list[str]]:
    """A context with a node for each host; yields their addresses."""
    options = {"--memory": "256MiB", "--spill": "0", "--spill-dir": str(directory)} | fault.node
    environment = {**os.environ, **fault.environment}
    with ExitStack() as stack:
        if fault.hosts == 1:
            command = [sys.executable, "-m", fault.command, "node", "--socket", str(directory / "node.sock")]
            command += [each for pair in options.items() for each in pair]
            node = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
            )
            stack.callback(_stop, node)
            assert node.stdout is not None
            yield [node.stdout.readline().strip().partition("=")[2]]
            return
        ends = stack.enter_context(namespaces.switch(fault.hosts, fault.network))
        memory = options.pop("--memory")
        flags = [each for pair in options.items() for each in pair]
        how = {"memory": memory, "options": flags, "command": fault.command, "environment": fault.environment}
        hosts = stack.enter_context(namespaces.nodes(ends, directory, **how))
        planes = [stack.enter_context(dp.connect(host.address)) for host in hosts]
        namespaces.together(planes)
        yield [host.address for host in hosts]


def _stop(node: subprocess.Popen[str]) -> None:
    node.terminate()
    try:
        node.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        node.kill()
        node.communicate()


@contextmanager
def _processes(pipeline: str, job: dict[str, Any], addresses: list[str]) -> Iterator[None]:
    """A context with the job's processes. With two hosts, half of the workers are on each, and the last role is on the
    second."""
    limits = {"max_rows": job["limits"]}
    workers, here, there = range(job["workers"]), addresses[0], addresses[-1]
    with dp.connect(here) as plane, ExitStack() as stack:
        tasks: list[tuple[Any, str, int]] = []
        made = [roles.roll_out, roles.act][pipeline == "agent"]
        for worker in workers:
            where = addresses[worker % len(addresses)]
            tasks.append((made, where, worker))
        if pipeline == "grpo":
            logged = ["log"] if job["ack_s"] else []
            limits = {"max_lag": job["limits"]}
            streams = [plane.stream("rollouts", tasks=["reward", "actor", *logged], **limits)]
            tasks += [(roles.reward, here, 0), (roles.train, there, 0)]
            tasks += [(roles.log_rows, here, 0)] * len(logged)
        else:
            archived = ["archive"] if job["ack_s"] else []
            streams = [plane.stream("trajectories", tasks=["verify", *archived], **limits)]
            streams.append(plane.stream("scored", tasks=["learner"], **limits))
            tasks += [(roles.verify, here, 0), (roles.learn, there, 0)]
            tasks += [(roles.archive, here, 0)] * len(archived)
        slow_there = job.get("slow_host", 1.0)
        try:
            for work, where, worker in reversed(tasks):  # consumers first, since producers wait for them
                slow = dict(job["slow"])
                if where != here and slow_there != 1.0:
                    slow |= {str(worker): slow_there}
                process = CONTEXT.Process(target=_work, args=(work, where, job | {"slow": slow}, worker), daemon=True)
                process.start()
                stack.callback(_end, process)
            yield
        finally:
            for stream in streams:
                stream.drop()


def _work(work: Callable[..., None], address: str, job: dict[str, Any], worker: int) -> None:
    with suppress(dp.DataplaneError):  # the streams were dropped at the end of the job
        work(address, job, worker)


def _end(process: Any) -> None:
    process.join(1.0)
    if process.is_alive():
        process.kill()
        process.join()
    process.close()
