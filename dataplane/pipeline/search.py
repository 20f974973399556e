"""Searches a plan of stages: rows into micro-batches, stages and their replicas on workers, and their order, together.

A candidate is a number of micro-batches and a way to fill them, the workers of each stage, and a priority rule for free
workers. It is simulated with the costs of the step's rows. The best one is changed, one element at a time, and a change
is kept if the step becomes shorter. The search begins with workers divided by the work of each stage, and with stages
on all workers.

Invariants: groups stay together; no stage has more workers than its `replicas`, or a worker without its `resource`. The
memory of plane and workers stays within the hosts' limits. The predicted time is at most that of the given plan, if
this fits.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, replace

import numpy as np

from dataplane.pipeline import programs
from dataplane.pipeline.cluster import Cluster
from dataplane.pipeline.events import Floats, play
from dataplane.pipeline.plans import Plan, Prediction, plan_of
from dataplane.pipeline.schedules import in_turn
from dataplane.pipeline.stages import Lengths, Pipeline, Rows

WAYS = ("in turn", "balanced", "by length")
RULES = ("late stages first", "micro-batches in order", "longest way first")
PATIENCE = 400
MOST = 256  # micro-batches


@dataclass(frozen=True)
class StagePlan:
    """The elements of a plan."""

    micro_batches: int
    way: str
    rule: str
    members: tuple[frozenset[int], ...]


class Search:
    """One search of plans of a step with these rows."""

    def __init__(self, pipeline: Pipeline, rows: Rows, cluster: Cluster, seconds: float, seed: int) -> None:
        self.pipeline, self.rows, self.cluster = pipeline, rows, cluster
        self.deadline = time.monotonic() + seconds
        self.random = np.random.default_rng(seed)
        self.considered = 0
        self._parts: dict[tuple[int, str], list[Lengths]] = {}
        self.weights = self._weights()
        self.eligible = [
            [w for w in range(cluster.workers) if not stage.resource or stage.resource in cluster.host(w).resources]
            for stage in pipeline.stages
        ]
        for stage, workers in zip(pipeline.stages, self.eligible, strict=True):
            if not workers:
                raise ValueError(f"{stage.name} needs {stage.resource}, and no host has that")

    def _weights(self) -> Floats:
        """float64 `[groups]`: the seconds of each group's rows in all stages."""
        rows = np.zeros(len(self.rows))
        for stage in self.pipeline.stages:
            cost = stage.cost
            rows += cost.row_s + (cost.token_s + cost.longest_s) * self.rows.tokens(cost.tokens)
        return np.array([rows[group].sum() for group in self.rows.groups])

    def parts(self, micro_batches: int, way: str) -> list[Lengths]:
        """The rows of each micro-batch."""
        if (micro_batches, way) not in self._parts:
            self._parts[micro_batches, way] = self._parted(micro_batches, way)
        return self._parts[micro_batches, way]

    def _parted(self, count: int, way: str) -> list[Lengths]:
        groups = self.rows.groups
        if way == "in turn":
            return in_turn(self.rows, count)
        heavy_first = np.argsort(-self.weights, kind="stable")
        if way == "by length":
            before = np.cumsum(self.weights[heavy_first]) - self.weights[heavy_first] / 2
            which = np.minimum(before / max(self.weights.sum(), 1e-300) * count, count - 1).astype(int)
            chosen = [heavy_first[which == i] for i in range(count)]
        else:  # the heaviest group goes to the micro-batch with the least load
            loads = [(0.0, i) for i in range(count)]
            bins: list[list[int]] = [[] for _ in range(count)]
            for group in heavy_first:
                load, i = heapq.heappop(loads)
                bins[i].append(int(group))
                heapq.heappush(loads, (load + self.weights[group], i))
            chosen = [np.array(sorted(each), np.int64) for each in bins]
        return [np.sort(np.concatenate([groups[g] for g in each])) for each in chosen if len(each)]

    def play(self, candidate: StagePlan) -> tuple[float, Plan] | None:
        """Simulate a candidate. Returns its seconds and plan; None if it exceeds a limit."""
        self.considered += 1
        parts = self.parts(candidate.micro_batches, candidate.way)
        overhead_s = self.cluster.overhead_s
        tasks = programs.stage_tasks(self.pipeline, self.rows, parts, overhead_s)
        tasks.key = self._keys(candidate.rule, tasks.work, len(parts))
        outcome = play(tasks, programs.room_of(self.cluster, [sorted(each) for each in candidate.members]))
        if not outcome.finished:
            return None
        plan = plan_of(
            self.cluster,
            programs.of_stages(self.pipeline, len(parts)),
            outcome.order(),
            parts=tuple(tuple(part.tolist()) for part in parts),
            schedule=f"{candidate.rule}; rows {candidate.way}",
        )
        predicted = plan.predict(self.pipeline, self.rows)
        return (predicted.step_s, plan) if self.fits(predicted) else None

    def fits(self, predicted: Prediction) -> bool:
        """Whether the plan stays within the memory limits of hosts, and finishes."""
        hosts = self.cluster.hosts
        store = all(
            not h.store_bytes or held <= h.store_bytes for h, held in zip(hosts, predicted.host_bytes, strict=True)
        )
        workers = [self.cluster.host(w).worker_bytes for w in range(self.cluster.workers)]
        own = all(not most or held <= most for most, held in zip(workers, predicted.worker_bytes, strict=True))
        return store and own and np.isfinite(predicted.step_s)

    def _keys(self, rule: str, work: Floats, count: int) -> Floats:
        stages = len(self.pipeline.stages)
        stage, micro = np.divmod(np.arange(stages * count), count)
        if rule == RULES[0]:
            return ((stages - 1 - stage) * count + micro).astype(np.float64)
        if rule == RULES[1]:
            return (micro * stages + stages - 1 - stage).astype(np.float64)
        way = work.reshape(stages, count).copy()
        for s in range(stages - 1, -1, -1):
            after = [way[t] for t in range(s + 1, stages) if s in self.pipeline.needs[t]]
            way[s] += np.max(after, axis=0) if after else 0.0
        return -way.ravel()

    # The starting points and the moves of a search

    def first(self) -> list[StagePlan]:
        """The initial candidates: workers divided by the work of each stage, and stages on all workers."""
        groups = len(self.rows.groups)
        workers = self.cluster.workers
        counts = sorted({min(groups, n, MOST) for n in (1, workers // 2 or 1, workers, 2 * workers, 4 * workers, 16)})
        found = []
        for count in counts:
            seconds = programs.stage_seconds(self.pipeline, self.rows, self.parts(count, "balanced")).sum(axis=1)
            for members in (self._shared_out(seconds, count), self._everywhere(seconds)):
                found += [StagePlan(count, way, RULES[0], members) for way in WAYS]
        return found

    def _shared_out(self, seconds: Floats, count: int) -> tuple[frozenset[int], ...]:
        stages = self.pipeline.stages
        members: list[set[int]] = [set() for _ in stages]
        load = np.zeros(self.cluster.workers)
        for s in np.argsort(-seconds):
            w = min(self.eligible[s], key=lambda w: (load[w], w))
            members[s].add(w)
            load[w] += seconds[s]
        for w in sorted(range(self.cluster.workers), key=lambda w: load[w]):
            if load[w]:
                continue
            can = [s for s in range(len(stages)) if w in self.eligible[s] and len(members[s]) < self._most(s, count)]
            if can:
                members[max(can, key=lambda s: seconds[s] / len(members[s]))].add(w)
        return tuple(frozenset(each) for each in members)

    def _everywhere(self, seconds: Floats) -> tuple[frozenset[int], ...]:
        load = np.zeros(self.cluster.workers)
        members = []
        for s in np.argsort(-seconds):
            most = self._most(int(s), MOST)
            chosen = sorted(self.eligible[s], key=lambda w: (load[w], w))[:most]
            load[chosen] += seconds[s] / len(chosen)
            members.append((int(s), frozenset(chosen)))
        return tuple(each for _, each in sorted(members))

    def _most(self, s: int, count: int) -> int:
        replicas = self.pipeline.stages[s].replicas
        return min(len(self.eligible[s]), count, replicas if replicas is not None else count)

    def changed(self, candidate: StagePlan) -> StagePlan | None:
        """The candidate with one random change; None if a stage would have no worker."""
        what = self.random.random()
        if what < 0.15:
            count = candidate.micro_batches
            count = int(self.random.choice([count - 1, count + 1, count * 2, count // 2, round(count * 1.3)]))
            return replace(candidate, micro_batches=int(np.clip(count, 1, min(len(self.rows.groups), MOST))))
        if what < 0.25:
            return replace(candidate, way=str(self.random.choice(WAYS)))
        if what < 0.35:
            return replace(candidate, rule=str(self.random.choice(RULES)))
        members = [set(each) for each in candidate.members]
        for _ in range(int(self.random.integers(1, 4))):
            s = int(self.random.integers(len(members)))
            w = int(self.random.choice(self.eligible[s]))
            if w in members[s]:
                members[s].discard(w)
            else:
                if len(members[s]) >= self._most(s, MOST):
                    members[s].discard(int(self.random.choice(sorted(members[s]))))
                members[s].add(w)
        if not all(members):
            return None
        return replace(candidate, members=tuple(frozenset(each) for each in members))


def plan(
    pipeline: Pipeline,
    rows: Rows,
    cluster: Cluster,
    *,
    seconds: float = 3.0,
    given: Plan | None = None,
    gain: float = 0.0,
    micro_batches: int | None = None,
    seed: int = 0,
) -> Plan:
    """Search a plan of a step with these rows, for at most about `seconds` seconds.

    given: a plan of the same rows. It is returned unless the found plan is shorter by the share `gain`, since a smaller
    gain may be an error of the model. micro_batches: their number; None: it is searched. Raises ValueError if a stage's
    resource is on no host, or no considered plan fits the memory.
    """
    began = time.monotonic()
    search = Search(pipeline, rows, cluster, seconds, seed)
    best: tuple[float, Plan] | None = None
    at: StagePlan | None = None
    predicted = None
    if given is not None:
        predicted = given.on(cluster).predict(pipeline, rows)
        predicted = predicted if search.fits(predicted) else None
        best = (predicted.step_s, given.on(cluster)) if predicted is not None else None
    least, candidates = float("inf"), search.first()
    if micro_batches is not None:
        candidates = [replace(each, micro_batches=micro_batches) for each in candidates]
    for candidate in candidates:
        played = search.play(candidate)
        if played is not None and played[0] < least:
            least, at = played[0], candidate
            best = played if best is None or played[0] < best[0] else best
        if time.monotonic() > search.deadline and best is not None:
            break
    missed = 0
    while at is not None and missed < PATIENCE and time.monotonic() < search.deadline:
        candidate_or_none = search.changed(at)
        missed += 1
        if candidate_or_none is None or (
            micro_batches is not None and candidate_or_none.micro_batches != micro_batches
        ):
            continue
        played = search.play(candidate_or_none)
        if played is not None and played[0] < least * (1 - 1e-6):
            least, at, missed = played[0], candidate_or_none, 0
            best = played if best is None or played[0] < best[0] else best
    if best is None:
        raise ValueError("no plan that was considered fits the memory of the hosts")
    if given is not None and predicted is not None and best[0] > predicted.step_s * (1 - gain):
        best = (predicted.step_s, given.on(cluster))
    bound = lower_bound(pipeline, rows, cluster)
    return replace(best[1], bound_s=bound, considered=search.considered, planning_s=time.monotonic() - began)


def lower_bound(pipeline: Pipeline, rows: Rows, cluster: Cluster) -> float:
    """A lower bound of the seconds of a step for every plan, with any micro-batches.

    The maximum of four bounds: all work over all workers; the work of each stage over its largest number of workers;
    computation over the hosts' cores; and, without a lag, the slowest row through all stages that follow each other.
    """
    seconds: list[float] = []
    way: list[Floats] = []
    for stage in pipeline.stages:
        cost, tokens = stage.cost, rows.tokens(stage.cost.tokens)
        one = cost.fixed_s + cost.row_s + (cost.token_s + cost.longest_s) * tokens
        longest = cost.longest_s * float(tokens.max(initial=0))
        seconds.append(cost.fixed_s + cost.row_s * len(rows) + cost.token_s * float(tokens.sum()) + longest)
        needed = pipeline.needs[len(way)]
        before = np.max([way[p] for p in needed], axis=0) if needed else np.zeros(len(one))
        way.append(np.asarray(one + before, np.float64))
    _, speed, cores, _ = cluster.arrays()
    fast = np.sort(speed)[::-1]
    bounds = [sum(seconds) / float(speed.sum())]
    for stage, took in zip(pipeline.stages, seconds, strict=True):
        bounds.append(took / float(fast[: stage.replicas].sum()))
    if (cores > 0).all():
        computing = sum(s.cost.cores * took for s, took in zip(pipeline.stages, seconds, strict=True))
        bounds.append(computing / float(cores.sum()) / float(fast[0]))
    if pipeline.lag == 0:
        bounds.append(float(np.max([each.max(initial=0.0) for each in way])) / float(fast[0]))
    return max(bounds)
