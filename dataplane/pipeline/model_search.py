"""Searches a plan of a model: cut, placement and schedule together, by the predicted time of each plan.

A candidate is a cut of the layers into chunks, a worker for each chunk, a cap on the micro-batches that each chunk
holds, and a priority rule for free workers. Its schedule is the result of a simulation: backward passes first, because
other chunks wait for them, then forward passes up to the caps, and gradients of weights when nothing else can be done
(zero-bubble pipelines, arXiv 2401.10241). The search begins with cuts that balance the workers, and chunks placed in
turn or back and forth. The best candidates are changed, one element at a time, and a change is kept if the step becomes
shorter. The three elements are those that AdaPtis (arXiv 2509.23722) adapts.

Invariants: no worker uses more memory than its host allows. Equal arguments give equal plans unless the time runs out.
The plan is no worse than 1F1B and interleaved 1F1B of equal layers if these fit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from dataplane.pipeline import programs
from dataplane.pipeline.cluster import Cluster
from dataplane.pipeline.events import Floats, Ints, Outcome, Room, play
from dataplane.pipeline.models import Model
from dataplane.pipeline.partition import allowed_cuts, balanced, even_out, lower_bound
from dataplane.pipeline.plans import Plan, plan_of
from dataplane.pipeline.schedules import interleaved

MOST_CHUNKS = 4  # a worker
ALIVE = 3  # candidates that are changed
PATIENCE = 300  # changes without a better plan


@dataclass(frozen=True)
class ModelPlan:
    """The choices that define a plan of a model."""

    bounds: Ints  # of the chunks, in layers
    worker_of: Ints  # of each chunk
    caps: Ints  # micro-batches that each chunk may hold
    group: int  # micro-batches that go through a chunk before another chunk of its worker has its turn
    split: bool = True


class ModelSearch:
    """One search. `alive`: the best candidates so far; `considered`: the number of simulated ones."""

    def __init__(self, model: Model, cluster: Cluster, micro_batches: int, seconds: float, seed: int) -> None:
        self.model, self.cluster, self.micro_batches = model, cluster, micro_batches
        self.deadline = time.monotonic() + seconds
        self.random = np.random.default_rng(seed)
        _, self.speed, _, _ = cluster.arrays()
        self.room_bytes = np.array([cluster.host(w).worker_bytes or np.inf for w in range(cluster.workers)])
        self.considered = 0
        self.cuts = allowed_cuts(model)
        self.alive: list[tuple[float, ModelPlan, Outcome]] = []

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self.deadline

    def begin(self) -> None:
        """Simulate the initial candidates; keep the best."""
        found: list[tuple[float, ModelPlan, Outcome]] = []
        for candidate in self._first():
            if (played := self.play(candidate)) is not None:
                found.append(played)
            if self.late and found:
                break
        found.sort(key=lambda each: each[0])
        kept: list[tuple[float, ModelPlan, Outcome]] = []
        for each in found:  # candidates that differ only in cuts, caps or groups count as one
            if all(
                len(each[1].bounds) != len(k[1].bounds) or (each[1].worker_of != k[1].worker_of).any() for k in kept
            ):
                kept.append(each)
        self.alive = kept[:ALIVE]

    def _first(self) -> Iterator[ModelPlan]:
        workers = self.cluster.workers
        for per_worker in range(1, MOST_CHUNKS + 1):
            chunks = per_worker * workers
            if chunks > len(self.cuts) - 1 or (per_worker > 2 and chunks * self.micro_batches > 60_000):
                return
            equal = balanced(self.model, chunks)
            turns = [np.arange(chunks) % workers]
            if per_worker > 1:
                turn, place = np.divmod(np.arange(chunks), workers)
                turns.append(np.where(turn % 2, workers - 1 - place, place))
            for worker_of in turns:
                bounds = even_out(self.model, equal, worker_of.astype(np.int32), self.speed)
                for scale in (1.0, 1.4, 2.0, 3.0):
                    caps = self.caps(bounds, worker_of, scale)
                    if caps is None:
                        continue
                    for group in (1, workers) if per_worker > 1 else (1,):
                        yield ModelPlan(bounds, worker_of.astype(np.int32), caps, group)

    def caps(self, bounds: Ints, worker_of: Ints, scale: float) -> Ints | None:
        """The cap of each chunk: the micro-batches that the busiest worker begins while one goes to the loss and back,
        times `scale`, limited by memory. None if not even one of each fits."""
        each = np.diff(self.model.sums[bounds], axis=0)
        there = each[:, 0] + each[:, 1] + 2 * self.cluster.hop_s
        way = np.cumsum(there[::-1])[::-1]
        pace = float((np.bincount(worker_of, each[:, :3].sum(axis=1), len(self.speed)) / self.speed).max())
        wanted = np.clip(np.ceil(scale * way / pace) + 1, 1, self.micro_batches)
        return self.fitted(each, worker_of, wanted)

    def fitted(self, each: Floats, worker_of: Ints, wanted: Floats) -> Ints | None:
        """The caps, reduced where they exceed the memory. None if even one micro-batch of each chunk does."""
        caps = wanted.copy()
        for w in range(self.cluster.workers):
            mine = np.flatnonzero(worker_of == w)
            room = self.room_bytes[w] - each[mine, 5].sum()
            while (caps[mine] * each[mine, 3]).sum() > room:
                most = mine[np.argmax(np.where(caps[mine] > 1, caps[mine] / wanted[mine], 0))]
                if caps[most] <= 1:
                    return None
                caps[most] -= 1
        return caps.astype(np.int32)

    def play(self, candidate: ModelPlan) -> tuple[float, ModelPlan, Outcome] | None:
        """Simulate a candidate. Returns its seconds, the candidate and the outcome; None if it exceeds the memory."""
        self.considered += 1
        chunks, count = len(candidate.bounds) - 1, self.micro_batches
        tasks = programs.chunk_tasks(self.model, candidate.bounds, count, candidate.split, self.cluster.overhead_s)
        tasks.key = keys(chunks, count, candidate.group, candidate.split)
        passes = 3 if candidate.split else 2
        host, speed, cores, rate = self.cluster.arrays()
        room = Room(
            host,
            speed,
            cores,
            rate,
            np.arange(passes * chunks + 1, dtype=np.int32),
            np.tile(candidate.worker_of, passes),
            self.cluster.hop_s,
            self.cluster.latency_s,
        )
        outcome = play(tasks, room, caps=candidate.caps)
        state = np.bincount(candidate.worker_of, np.diff(self.model.sums[candidate.bounds, 5]), self.cluster.workers)
        if not outcome.finished or ((outcome.peak + state) > self.room_bytes * (1 + 1e-9)).any():
            return None
        return outcome.makespan, candidate, outcome

    def improve(self) -> None:
        """Change the best candidates until the time is over, or `PATIENCE` changes in a row improve none."""
        for at in range(len(self.alive)):
            best = self.alive[at]
            missed, most = 0, PATIENCE if at == 0 else PATIENCE // 2
            while missed < most and not self.late:
                changed = self._changed(best[1], best[2])
                played = self.play(changed) if changed is not None else None
                if played is not None and played[0] < best[0] * (1 - 1e-9):
                    best, missed = played, 0
                else:
                    missed += 1
            self.alive[at] = best
        self.alive.sort(key=lambda each: each[0])

    def _changed(self, candidate: ModelPlan, outcome: Outcome) -> ModelPlan | None:
        what = self.random.random()
        if what < 0.55:
            return self._cut(candidate, outcome)
        if what < 0.85:
            return self._cap(candidate)
        if what < 0.95 and len(candidate.caps) > self.cluster.workers:
            return self._swap(candidate)
        group = int(self.random.choice([1, 2, self.cluster.workers // 2 or 1, self.cluster.workers]))
        return replace(candidate, group=group)

    def _cut(self, candidate: ModelPlan, outcome: Outcome) -> ModelPlan | None:
        """The candidate with a cut moved by a piece; half of the time one of the busiest worker's."""
        index = np.searchsorted(self.cuts, candidate.bounds)
        if self.random.random() < 0.5:
            busy = np.bincount(outcome.worker, outcome.end - outcome.start, self.cluster.workers)
            mine = np.flatnonzero(candidate.worker_of == int(busy.argmax()))
            chunk = int(self.random.choice(mine))
            at = chunk + int(self.random.integers(2))
            step = 1 if at == chunk else -1
        else:
            at, step = int(self.random.integers(1, max(2, len(index) - 1))), int(self.random.choice([-1, 1]))
        if not 0 < at < len(index) - 1:
            return None
        index[at] += step
        if index[at] == index[at + step]:  # the next chunk would be empty: it moves on as well
            index[at + step] += step if 0 < at + step < len(index) - 1 else 0
        if (np.diff(index) < 1).any():
            return None
        return self._refit(replace(candidate, bounds=self.cuts[index]))

    def _cap(self, candidate: ModelPlan) -> ModelPlan | None:
        caps = candidate.caps.astype(np.float64)
        if self.random.random() < 0.3:
            caps = np.ceil(caps * self.random.choice([0.8, 1.2, 1.5]))
        else:
            some = self.random.integers(len(caps), size=int(self.random.integers(1, 4)))
            caps[some] += self.random.choice([-2, -1, 1, 2])
        return self._refit(replace(candidate, caps=np.clip(caps, 1, self.micro_batches).astype(np.int32)))

    def _swap(self, candidate: ModelPlan) -> ModelPlan | None:
        worker_of = candidate.worker_of.copy()
        a, b = self.random.integers(len(worker_of), size=2)
        worker_of[a], worker_of[b] = worker_of[b], worker_of[a]
        return self._refit(replace(candidate, worker_of=worker_of))

    def _refit(self, candidate: ModelPlan) -> ModelPlan | None:
        each = np.diff(self.model.sums[candidate.bounds], axis=0)
        caps = self.fitted(each, candidate.worker_of, candidate.caps.astype(np.float64))
        return None if caps is None else replace(candidate, caps=caps)


def keys(chunks: int, micro_batches: int, group: int, split: bool) -> Floats:
    """The priorities, the lowest first: backward passes, late chunks first; forward passes; gradients of weights.
    `group` micro-batches go through a chunk in each turn."""
    chunk, micro = np.divmod(np.arange(chunks * micro_batches), micro_batches)
    turn = micro // group * chunks * group + micro % group
    step = float(chunks * micro_batches * 2)
    parts = [step + turn + chunk * group, turn + (chunks - 1 - chunk) * group, 2 * step + micro * chunks + chunk]
    return np.concatenate(parts[: 3 if split else 2]).astype(np.float64)


def plan_model(model: Model, cluster: Cluster, micro_batches: int, *, seconds: float = 5.0, seed: int = 0) -> Plan:
    """Search a plan of a step with `micro_batches` micro-batches, for about `seconds` seconds.

    The memory of each worker is limited by its host's `worker_bytes`. Raises ValueError if the model has fewer
    pieces than there are workers, or no considered plan fits the memory.
    """
    began = time.monotonic()
    search = ModelSearch(model, cluster, micro_batches, seconds, seed)
    if len(search.cuts) - 1 < cluster.workers:
        raise ValueError(
            f"{model.name} can be cut into {len(search.cuts) - 1} chunks, and there are {cluster.workers} workers"
        )
    search.begin()
    search.improve()
    bound = lower_bound(model, cluster.workers, micro_batches, search.speed)
    plans = list(_known(model, cluster, micro_batches, search.room_bytes))
    if search.alive:
        _, candidate, outcome = search.alive[0]
        instructions = programs.of_chunks(len(candidate.bounds) - 1, micro_batches, candidate.split)
        bounds = tuple(int(b) for b in candidate.bounds)
        plans.append(plan_of(cluster, instructions, outcome.order(), bounds=bounds, schedule="found"))
    if not plans:
        raise ValueError(f"no plan of {model.name} that was considered fits the memory of the workers")
    best = min(plans, key=lambda plan: plan.predict(model).step_s)
    considered = search.considered + len(plans) - 1
    return replace(best, bound_s=bound, considered=considered, planning_s=time.monotonic() - began)


def _known(model: Model, cluster: Cluster, micro_batches: int, room_bytes: Floats) -> Iterator[Plan]:
    """1F1B and interleaved 1F1B, with equal and balanced layers, if they fit."""
    pieces = len(allowed_cuts(model)) - 1
    for chunks in (1, 2):
        if chunks * cluster.workers > pieces or (chunks > 1 and micro_batches % cluster.workers):
            continue
        cuts = [balanced(model, chunks * cluster.workers)]
        if model.cuts is None and len(model.layers) >= chunks * cluster.workers:
            cuts.append(interleaved(model, cluster, micro_batches, chunks).bounds)  # type: ignore[arg-type]
        for bounds in cuts:
            plan = interleaved(model, cluster, micro_batches, chunks, bounds)
            if (plan.predict(model).worker_bytes <= room_bytes * (1 + 1e-9)).all():
                yield plan
