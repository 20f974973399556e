"""Runs a plan: starts a node and the processes, and receives their messages until all have ended.

This process creates the stream, sends the trainer's progress to rollout workers, and closes the stream when all rows
are appended. No row passes through it. Invariant: when `run` returns or raises, the node and all processes have ended.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import dataplane as dp
from bench.replaying import ranks, rewards, rollouts
from bench.replaying.implied import Times
from bench.replaying.memory import Memory
from bench.replaying.plan import Plan
from bench.replaying.telling import Did, Failed, Policy, Ready

TASKS = ("reward", "reference", "train")
LOOK_S = 0.1  # between two looks at memory and the stream


class Broken(Exception):
    """A process failed or was too slow, or a row was lost or delivered twice."""


@dataclass
class Replayed:
    """The figures of a run: times, the rows of each process, its waits and bytes, and the memory."""

    times: Times = field(default_factory=Times)
    #: By process, the rows that it made or got, in the order in which it finished them.
    seen: dict[str, list[int]] = field(default_factory=dict)
    spent: dict[str, dict[str, float]] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    node: dict[str, float] = field(default_factory=dict)
    #: Of each update, the mean lag of its rows in policy versions.
    lags: list[float] = field(default_factory=list)
    seconds: float = 0.0


def run(plan: Plan, config: dp.NodeConfig, patience_s: float) -> Replayed:
    """Run the plan on a node of its own. Raises Broken if a process fails, or after `patience_s` seconds."""
    with dp.connect(config=config) as plane, _Processes() as processes:
        stream = plane.stream("replay", tasks=TASKS)
        replay = _Replay(plan, plane, stream, processes, patience_s)
        try:
            replay.run()
        finally:
            stream.drop()
    return replay.found


class _Replay:
    """The state of a run in the main process."""

    def __init__(
        self, plan: Plan, plane: dp.Plane, stream: dp.Stream, processes: _Processes, patience_s: float
    ) -> None:
        self.found = Replayed()
        self._plan, self._plane, self._stream, self._processes = plan, plane, stream, processes
        self._node = plane.stats().pid
        self._deadline = time.monotonic() + patience_s
        self._looked = 0.0
        self._waiting = 0  # processes that are not ready yet
        self._trained = 0  # rows of the updates that are over
        self._told: Policy | None = None
        self._began = 0.0

    def run(self) -> None:
        """Start all processes, and receive their messages until all have ended."""
        self._start()
        for said in self._said():
            if isinstance(said, Ready):
                self._waiting -= 1
                if not self._waiting:
                    self._began = time.monotonic()
                    self._tell()
            elif isinstance(said, Did):
                self._note(said)
            elif isinstance(said, Failed):
                raise Broken(f"{said.process} failed:\n{said.error}")
            else:
                self.found.spent[said.process] = said.spent
                if all(name in self.found.spent for name in self._rollouts):
                    self._stream.close()
        self.found.seconds = time.monotonic() - self._began
        self.found.times.expired = self._stream.stats()["task"]["train"]["expired"]
        stats = self._plane.stats()
        names = ("memory_peak", "spilled_bytes", "restored_bytes", "waits", "waited_s", "put_bytes")
        self.found.node = {name: getattr(stats, name) for name in names}

    def _start(self) -> None:
        plan, address, start = self._plan, self._plane.address, self._processes.start
        self._rollouts = [f"rollout {worker}" for worker in range(plan.workers)]
        for worker, name in enumerate(self._rollouts):
            start(name, rollouts.work, plan, address, worker)
        start("reward", rewards.work, plan, address)
        for rank in range(plan.reference.count):
            at = divmod(rank, plan.reference.tp)
            start(f"reference {at[0]}.{at[1]}", ranks.reference, plan, address, *at)
        self._together = self._processes.barrier(plan.trainer.count)  # kept: needs a reference here
        for rank in range(plan.trainer.count):
            at = divmod(rank, plan.trainer.tp)
            start(f"trainer {at[0]}.{at[1]}", ranks.train, plan, address, *at, last=self._together)
        self._waiting = plan.processes

    def _said(self) -> Iterator[Any]:
        """Yield the messages of processes, until all have ended."""
        while self._processes.alive:
            if time.monotonic() > self._deadline:
                raise Broken(f"it is not over in time; the stream: {dict(self._stream.stats())}")
            yield from self._processes.said(LOOK_S)
            if time.monotonic() >= self._looked + LOOK_S:
                self._looked = time.monotonic()
                self.found.memory.sample(self._node, self._processes.pids)
                if self._plan.max_lag and self._began:
                    self._tell()

    def _tell(self) -> None:
        """Send the newest version and the number of finished rows to rollout workers."""
        expired = self._stream.stats()["task"]["train"]["expired"] if self._plan.max_lag else 0
        policy = Policy(len(self.found.times.trained), self._trained + expired)
        if policy != self._told:
            self._told = policy
            for name in self._rollouts:
                self._processes.tell(name, policy)

    def _note(self, did: Did) -> None:
        self.found.seen.setdefault(did.process, []).extend(did.rows)
        times, at = self.found.times, did.at - self._began
        if did.task != "train":
            of = {"rollout": times.made, "reward": times.rewarded, "reference": times.referenced}[did.task]
            of.update(dict.fromkeys(did.rows, at) if did.process.endswith(".0") or did.task != "reference" else {})
        elif did.process == "trainer 0.0":
            times.began.append(did.began - self._began)
            times.trained.append(at)
            self.found.lags.append(did.lag)
            self._trained += did.update
            self._tell()


def check(plan: Plan, found: Replayed) -> None:
    """Check that each row was made once, and delivered once to each task and tensor-parallel rank, or expired. Raises
    Broken."""
    everyone = list(range(plan.rows))
    for task, tps in (("rollout", 0), ("reward", 0), ("reference", plan.reference.tp), ("trainer", plan.trainer.tp)):
        for tp in range(max(1, tps)):
            ends = f".{tp}" if tps else ""
            names = [name for name in found.seen if name.startswith(task) and name.endswith(ends)]
            rows = sorted(row for name in names for row in found.seen[name])
            missing = found.times.expired if task == "trainer" else 0
            if len(set(rows)) != len(rows) or len(rows) + missing != plan.rows or not set(rows) <= set(everyone):
                raise Broken(
                    f"{task}{ends}: {len(rows)} rows, {len(set(rows))} distinct, {missing} expired, of {plan.rows}"
                )


class _Processes:
    """Processes, by name. A context manager: at its end, all processes have ended."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._running: dict[Connection, tuple[str, Any]] = {}

    @property
    def alive(self) -> bool:
        """Whether any process has not ended."""
        return bool(self._running)

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of those that have not ended, by name."""
        return {name: process.pid for name, process in self._running.values()}

    def barrier(self, count: int) -> Any:
        """A barrier of `count` processes."""
        return self._context.Barrier(count)

    def start(self, name: str, target: Callable[..., None], *args: Any, last: Any = None) -> None:
        """Start a process. It calls `target` with `args`, its end of a pipe, and `last`, if given."""
        ours, theirs = self._context.Pipe()
        rest = (theirs,) if last is None else (theirs, last)
        process = self._context.Process(target=_live, args=(name, target, theirs, *args, *rest), name=name, daemon=True)
        process.start()
        theirs.close()
        self._running[ours] = name, process

    def tell(self, name: str, what: Any) -> None:
        """Send a message to a process. Does nothing if the process has ended."""
        for pipe, (other, _) in self._running.items():
            if other == name:
                with suppress(BrokenPipeError):
                    pipe.send(what)

    def said(self, timeout: float) -> Iterator[Any]:
        """The messages that arrive within `timeout` seconds; `Failed` for a process that ended with an error."""
        ready: list[Any] = list(wait(list(self._running), timeout))
        for pipe in ready:
            name, process = self._running[pipe]
            try:
                yield pipe.recv()
            except (EOFError, ConnectionError):
                del self._running[pipe]
                pipe.close()
                process.join()
                if process.exitcode:
                    yield Failed(name, f"ended with exit code {process.exitcode}")  # a signal's, if negative
                process.close()

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, (_, process) in self._running.items():
            process.kill()
            process.join()
            process.close()
            pipe.close()


def _live(name: str, target: Callable[..., None], pipe: Connection, *args: Any) -> None:
    """Run the main function of a process. Sends `Failed` if it raises."""
    try:
        target(*args)
    except BaseException:
        with suppress(ConnectionError):
            pipe.send(Failed(name, traceback.format_exc()))
        raise SystemExit(1) from None
