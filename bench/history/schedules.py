"""Bubbles and step times of schedules, over the lengths of the workloads, in the model of `bench.history.timeline`.

A task's prompts are drawn once, with `2 * samples` responses each. Half of the responses are history, of an earlier
epoch. The other half are the actual responses of the simulated epoch, unknown to the schedules. So predictions of a
prompt's lengths are as good as the correlation of siblings in the workload allows.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from bench.history.timeline import Rollouts
from bench.workloads import generate
from dataplane.history.drafter import COST
from dataplane.history.lengths import Floats, Lengths, Past, predict
from dataplane.history.scheduling import BASE, Schedule, plan

TASKS = ("video_understanding_7b", "math_dapo_32b", "code_14b", "search_7b")
WORKERS = (8, 16, 32, 64)

#: Decoding with drafts from responses of the similarity 0.85. `pace`: tokens a verification (`bench.history.drafts`
#: measures 4.1 to 4.5). `each`: cost of a response in a verification of 4.5 proposed tokens (`history.drafter.COST`).
DRAFTED = {"pace": 4.3, "each": 1 + 4.5 * COST}


def lengths_of(task: str, *, prompts: int, samples: int, steps: int, seed: int, epochs: int = 1) -> tuple[Any, Any]:
    """Tokens of responses, by step: of earlier epochs [prompts, epochs * samples], and of the simulated epoch [prompts,
    samples]."""
    trace = generate(task, prompts=prompts, samples=(1 + epochs) * samples, steps=steps, seed=seed)
    before, now = [], []
    for step in trace.steps:
        tokens = np.add.reduceat(step.turn_output_tokens, step.offsets[:-1]).astype(np.float64)
        table = np.maximum(tokens, 1.0).reshape(prompts, -1)
        before.append(table[:, : epochs * samples])
        now.append(table[:, epochs * samples :])
    return before, now


def predicted(before: Floats) -> Lengths:
    return predict([Past([(0, int(each)) for each in row]) for row in before])


def ranks(values: Floats) -> Floats:
    return np.argsort(np.argsort(values)).astype(np.float64)


def correlation(one: Floats, other: Floats) -> float:
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def exact(now: Floats) -> Lengths:
    """Predicted lengths without error: the actual ones."""
    from dataplane.history.lengths import Lengths as Made

    center = np.log(now.mean(axis=1))
    return Made(center, np.full(len(now), 1e-3), np.zeros(len(now)), np.full(len(now), now.shape[1]))


def at_random(lengths: Lengths, workers: int, samples: int, slots: int, seed: int) -> Schedule:
    """Equal numbers of random prompts on each worker."""
    drawn = np.random.default_rng(seed).permutation(len(lengths))
    nothing = np.zeros(workers)
    return Schedule(list(np.array_split(drawn, workers)), nothing, nothing, lengths, samples, slots)


def balanced(now: Floats, lengths: Lengths, workers: int, samples: int, slots: int) -> Schedule:
    """Balance actual tokens: prompts with the most tokens first, each to the worker with the fewest."""
    total, given = np.zeros(workers), [[] for _ in range(workers)]  # type: ignore[var-annotated]
    for at in np.argsort(-now.sum(axis=1)).tolist():
        worker = int(total.argmin())
        total[worker] += now[at].sum()
        given[worker].append(at)
    return Schedule([np.array(each, np.int64) for each in given], total, total, lengths, samples, slots)


def compared(
    task: str, workers: int, *, prompts: int, samples: int, steps: int, seed: int, slots: int
) -> dict[str, Any]:
    """Bubbles, times and moves of each kind of schedule."""
    before, now = lengths_of(task, prompts=prompts, samples=samples, steps=steps, seed=seed)
    told, known = [predicted(each) for each in before], [exact(each) for each in now]
    drawn = [at_random(each, workers, samples, slots, seed + n) for n, each in enumerate(told)]
    piped, ideal = pipelined(told, workers, samples, slots), pipelined(known, workers, samples, slots)
    fair = [balanced(n, each, workers, samples, slots) for n, each in zip(now, known, strict=True)]
    ways: dict[str, tuple[list[Schedule], dict[str, Any]]] = {
        "random": (drawn, {}),
        "known": (fair, {}),
        "random, lag 1": (drawn, {"max_lag": 1}),
        "histopipe, lag 1": (piped, {"max_lag": 1, "migrate": True}),
        "histopipe, lag 1, known": (ideal, {"max_lag": 1, "migrate": True}),
        "histopipe, lag 2": (piped, {"max_lag": 2, "migrate": True}),
        "histopipe, lag 1, partial": (piped, {"max_lag": 1, "migrate": True, "partial": 0.02}),
        "random, drafts": (drawn, DRAFTED),
        "histopipe, lag 1, drafts": (piped, {"max_lag": 1, "migrate": True, **DRAFTED}),
    }
    found: dict[str, Any] = {"task": task, "workers": workers, "slots": slots}
    for name, (schedules, how) in ways.items():
        timeline = Rollouts(schedules, now, **how).run()
        found[name] = {"bubbles": timeline.bubbles, "seconds": timeline.duration, "moves": timeline.moves}
    piped_time, chain = found["histopipe, lag 1"], longest_chain(now, 1)
    busy = (1 - piped_time["bubbles"]) * piped_time["seconds"]
    found["floor, lag 1"] = {"bubbles": max(0.0, 1 - busy / chain), "seconds": chain, "moves": 0}
    mean = np.concatenate([each.mean(axis=1) for each in now])
    found["rank correlation"] = correlation(np.concatenate([each.tokens for each in told]), mean)
    return found


def longest_chain(now: list[Floats], lag: int) -> float:
    """The least time of any schedule, in units of `Timeline.duration`: each step's longest response has a worker alone,
    and step n begins when step n - lag - 1 has ended."""
    longest = [float(each.max()) * (BASE + 1) for each in now]
    return max(sum(longest[first :: lag + 1]) for first in range(lag + 1))


def pipelined(lengths: list[Lengths], workers: int, samples: int, slots: int) -> list[Schedule]:
    """Schedules of steps. Each is planned with the workers' ends of the step before."""
    found: list[Schedule] = []
    for step, each in enumerate(lengths):
        behind = found[-1].ends - found[-1].ends.min() if found else None
        found.append(plan(each, workers, step=step, samples=samples, slots=slots, behind=behind))
    return found


def run(*, each: int = 32, samples: int = 8, steps: int = 8, slots: int = 64) -> dict[str, Any]:
    """Compare schedules for all tasks and numbers of workers, with `each` prompts a worker, and print the results."""
    rows = []
    for task in TASKS:
        for workers in WORKERS:
            row = compared(task, workers, prompts=each * workers, samples=samples, steps=steps, seed=7, slots=slots)
            rows.append(row)
            said = "; ".join(
                f"{name} {value['bubbles']:.3f} ({row['random']['seconds'] / value['seconds']:.2f} x)"
                for name, value in row.items()
                if isinstance(value, dict)
            )
            print(f"{task} {workers}: rank {row['rank correlation']:.2f}; {said}", file=sys.stderr)
    return {"schedules": rows}
