"""Processes of one host that use one stream are killed at random moments. What each was told is in a file of its own;
at the end the rules of streams are held against all of it, and nothing may be left on the node.

What happens is drawn from a seed.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import dataplane as dp
from tests.chaos.history import Event, History
from tests.processes import StandingNode, Worker, eventually

ROLES = ("producer", "producer", "producer", "reward", "reward", "actor", "actor", "putter", "drafter")
TASKS = ("reward", "actor")
STEP = 1 << 32  # numbers of rows of one producer
_WIDTH = 1500
_DRAIN_S = 60.0


def values(ids: Any) -> Any:
    return (np.asarray(ids, np.int64)[:, None] * 1009 + np.arange(_WIDTH)).astype(np.int64)


class Told:
    """A file that a process writes to before and after each call, a line at a time, so that its death loses none."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def __call__(self, what: str, task: str = "", rows: Any = (), began: float = 0.0) -> None:
        now = time.monotonic()
        os.write(self._file, (json.dumps([began or now, now, what, task, list(rows)]) + "\n").encode())


def work(pipe: Any, role: str, number: int, address: str, log: str, seed: str) -> None:
    """One process, until it is killed or the stream is at its end."""
    told, chance = Told(log), random.Random(seed)
    with dp.connect(address) as plane:
        stream = plane.stream("s")
        turn = {"producer": _produce, "reward": _consume, "actor": _consume, "putter": _put, "drafter": _draft}[role]
        turns = 0
        while True:
            try:
                turn(plane, stream, told, chance, role, number, turns)
            except dp.NotReady:
                pass
            except dp.Closed:
                return
            except (dp.Backpressure, dp.LeaseExpired) as error:
                told(type(error).__name__)
            turns += 1


def _produce(plane: Any, stream: Any, told: Told, chance: random.Random, role: str, number: int, turn: int) -> None:
    first = number * STEP + turn * 128
    ids = list(range(first, first + chance.choice([1, 4, 8, 30, 100])))
    how: dict[str, Any] = {"keys": [str(i) for i in ids], "group": [f"g{i // 8}" for i in ids], "version": turn}
    columns = {"id": np.array(ids), "x": values(ids)}
    told("append?", rows=ids)
    if chance.random() < 0.5:
        stream.append(columns, timeout=60, **how)
    else:  # what is put belongs to the node, and to who frees its scope
        ref = plane.put(columns, scope=f"process {number}", timeout=60)
        try:
            stream.append(ref, timeout=60, **how)
        except dp.Backpressure:
            plane.free(ref)
            raise
    told("append", rows=ids)


def _consume(plane: Any, stream: Any, told: Told, chance: random.Random, role: str, number: int, turn: int) -> None:
    columns = ["id", "x"] if role == "reward" else ["id", "x", "r"]
    lease_s, began = chance.choice([0.5, 2.0, 60.0]), time.monotonic()
    delivery = stream.consume(
        role, rows=chance.choice([1, 16, 64, 300]), columns=columns, lease=lease_s, timeout=1
    ).__enter__()
    try:
        batch = delivery.get(timeout=60)
    except dp.Backpressure:
        delivery.nack()
        raise
    ids = batch["id"].to_list()
    told("deliver", role, ids, began)
    if not np.array_equal(batch["x"].numpy(), values(ids)) or delivery.keys != [str(i) for i in ids]:
        told("wrong", role, ids)
    if role == "actor" and not np.array_equal(batch["r"].numpy(), np.array(ids) * 0.5):
        told("wrong", role, ids)
    if role == "reward":
        stream.extend(delivery.ref, {"r": np.array(ids) * 0.5}, timeout=60)
    if chance.random() < 0.05:
        delivery.nack()
        return
    if chance.random() < 0.03:
        time.sleep(lease_s if lease_s < 60 else 0.0)  # a slow one, whose lease may end
    told("ack?", role, ids)
    delivery.ack()
    told("ack", role, ids)


def _put(plane: Any, stream: Any, told: Told, chance: random.Random, role: str, number: int, turn: int) -> None:
    if stream.stats()["closed"]:
        raise dp.Closed("the end")
    written = np.random.default_rng(turn).integers(0, 255, chance.choice([1000, 300_000, 3_000_000]), np.uint8)
    ref = plane.put({"x": written}, scope=f"process {number}", timeout=60)
    view = plane.get(ref, timeout=60)["x"].numpy()
    if not np.array_equal(view, written):
        told("wrong", "put", [turn])
    if chance.random() < 0.8:
        del view
    plane.free(ref)


def _draft(plane: Any, stream: Any, told: Told, chance: random.Random, role: str, number: int, turn: int) -> None:
    if stream.stats()["closed"]:
        raise dp.Closed("the end")
    with plane.draft({"x": dp.dense([200_000], "uint8")}, scope=f"process {number}", timeout=60) as draft:
        draft["x"][:] = turn % 251
        ref = draft.seal()
    if not bool((plane.get(ref, timeout=60)["x"].numpy() == turn % 251).all()):
        told("wrong", "draft", [turn])
    plane.free(ref)


@dataclass(slots=True)
class Found:
    kills: int = 0
    appended: int = 0
    acked: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    spilled: int = 0


def told_by(lines: list[str], history: History, errors: Counter[str]) -> None:
    """Add what a process wrote: of what it was asking when it was killed, nobody knows what came."""
    asked: Event | None = None
    for line in lines:
        began, ended, what, task, rows = json.loads(line)
        event = Event(what.rstrip("?"), tuple(rows), task, began, ended)
        if what in ("append?", "ack?"):
            asked = event
        elif what == "wrong":
            history.wrong.append(f"{task!r} saw other columns than those of {rows[:4]}")
        elif what in ("append", "ack", "deliver"):
            history.events.append(event)
            asked = None
        else:
            errors[what] += 1
            if asked is not None:
                history.events.append(replace(asked, ended=ended, done=False, why=what))
                asked = None
    if asked is not None:
        history.events.append(replace(asked, done=False, why="OutcomeUnknown"))


@dataclass(frozen=True, slots=True)
class Left:
    """What a node holds. `segments`: its memory files; `descriptors`: all others."""

    descriptors: int
    segments: int
    threads: int
    files: int
    figures: dict[str, int]

    @classmethod
    def of(cls, node: StandingNode, plane: Any, spill: Path) -> Left:
        process, stats = psutil.Process(node.pid), plane.stats()
        names = ("shards", "memory_used", "disk_used", "pinned_bytes", "reserved_bytes", "waiting", "clients")
        files = sum(len(names) for _, _, names in os.walk(spill))
        memory, segments = _memory_files(node)
        figures = {name: getattr(stats, name) for name in names}
        return cls(process.num_fds() - memory, segments, process.num_threads(), files, figures)


class Run:
    """One node, its processes, and what befalls them."""

    def __init__(self, seed: int, directory: Path, stack: ExitStack) -> None:
        self._chance = random.Random(seed)
        self._seed = seed
        self._directory = directory
        self._spill = directory / "spill"
        self._stack = stack
        self._node = stack.enter_context(
            StandingNode(directory, memory="16MiB", spill="128MiB", spill_dir=self._spill, reservation_lease_s=5.0)
        )
        self._plane = stack.enter_context(dp.connect(self._node.address))
        self._stream = self._plane.stream("s", tasks=list(TASKS), max_bytes="40MiB", max_deliveries=255)
        self._workers: dict[int, tuple[Worker, int]] = {}
        self._started = 0

    def _start(self, place: int) -> None:
        self._started += 1
        number, role = self._started, ROLES[place]
        log = self._directory / f"{number}.log"
        worker = Worker(work, role, number, self._node.address, str(log), f"{self._seed} {number}")
        self._workers[place] = worker, number

    def _kill(self, place: int) -> None:
        worker, number = self._workers.pop(place)
        worker.kill()
        worker.__exit__(None, None, None)
        self._plane.free(scope=f"process {number}")  # what it put and did not give away

    def run(self, kills: int, seconds: float) -> Found:
        """Kill so many, or for so long; then let the others finish. What was found."""
        found = Found()
        before = Left.of(self._node, self._plane, self._spill)
        self._stack.callback(self._end)
        for place in range(len(ROLES)):
            self._start(place)
        until = time.monotonic() + seconds
        while found.kills < kills and time.monotonic() < until:
            time.sleep(self._chance.random() * 0.15)  # how long it runs, not a wait for anything
            place = self._chance.randrange(len(ROLES))
            self._kill(place)
            found.kills += 1
            self._start(place)
        self._drain()
        history = self._history(found.errors)
        found.broken += history.broken()
        found.appended = sum(len(event.rows) for event in history.of("append", True))
        found.acked = sum(len(event.rows) for event in history.of("ack", True))
        self._check_nothing_left(before, found)
        return found

    def _drain(self) -> None:
        for place, role in enumerate(ROLES):
            if role not in TASKS:
                self._kill(place)
        self._stream.close()
        until = time.monotonic() + _DRAIN_S
        for place in list(self._workers):
            worker, _ = self._workers.pop(place)
            while time.monotonic() < until and worker.alive:
                time.sleep(0.01)
            worker.__exit__(None, None, None)

    def _end(self) -> None:
        for worker, _ in self._workers.values():
            worker.__exit__(None, None, None)

    def _history(self, errors: Counter[str]) -> History:
        history = History(TASKS)
        for path in self._directory.glob("*.log"):
            told_by(path.read_text().split("\n")[:-1], history, errors)  # who is killed may leave half a line
        return history

    def _check_nothing_left(self, before: Left, found: Found) -> None:
        stats = self._stream.stats()
        if stats["rows"]:
            found.broken.append(f"the stream is not drained: {stats}")

        def nothing() -> bool:
            now = Left.of(self._node, self._plane, self._spill)
            same = now.files == before.files and now.figures == before.figures
            small = now.segments <= _SEGMENTS and now.threads <= before.threads
            return same and small and now.descriptors == before.descriptors

        try:
            eventually(nothing)
        except AssertionError:
            now = Left.of(self._node, self._plane, self._spill)
            found.broken.append(f"left on the node: {now}, where there was {before}; {self._plane.stats().holders}")
        found.spilled = self._plane.stats().spilled_bytes
        self._stream.drop()


_SEGMENTS = 6
"""The node's own, for small shards and for those read back, which are few. Those of processes go with them."""


def _memory_files(node: StandingNode) -> tuple[int, int]:
    """The descriptors of a node's segments, and how many segments those are."""
    files: list[int] = []
    for link in Path(f"/proc/{node.pid}/fd").iterdir():
        with suppress(OSError):
            if "memfd:dataplane" in os.readlink(link):
                files.append(os.stat(link).st_ino)
    return len(files), len(set(files))


def run(seed: int, kills: int, directory: Path, seconds: float = 3600.0) -> Found:
    """A run of this seed: so many kills, or for so many seconds if that is less."""
    with ExitStack() as stack:
        return Run(seed, directory, stack).run(kills, seconds)
