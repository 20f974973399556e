"""The simulation of tasks: their times and memory follow the rules, whatever the plan."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.pipeline.events import Outcome, Room, Tasks, play

EPSILON_S = 1e-6


def tasks_of(work: list[float], edges: list[tuple[int, int, float]], **more: object) -> Tasks:
    count = len(work)
    edges = sorted(edges)
    usual = {
        "cores": [0.0] * count,
        "queue": list(range(count)),
        "key": [float(i) for i in range(count)],
        "slot": [-1] * count,
        "take": [0] * count,
        "out": [0.0] * count,
        "alloc": [0.0] * count,
        "release": [0.0] * count,
    } | more
    at = np.searchsorted([edge[0] for edge in edges], range(count + 1))
    return Tasks(
        np.array(work, float),
        *(np.array(usual[name]) for name in usual),
        at.astype(np.int32),
        np.array([edge[1] for edge in edges], np.int32),
        np.array([edge[2] for edge in edges], float),
    )


def room_of(workers: list[list[int]], queues: int, hosts: list[int] | None = None, **more: object) -> Room:
    """Workers, each with the queues that it takes from."""
    members = [[w for w, mine in enumerate(workers) if q in mine] for q in range(queues)]
    host = hosts or [0] * len(workers)
    usual = {
        "host_cores": np.zeros(max(host) + 1),
        "host_rate": np.zeros(max(host) + 1),
        "hop_s": 0.0,
        "latency_s": 0.0,
    }
    usual |= more
    return Room(
        np.array(host, np.int32),
        np.array(usual.pop("speed", [1.0] * len(workers)), float),
        np.array(usual["host_cores"], float),
        np.array(usual["host_rate"], float),
        np.cumsum([0, *map(len, members)]).astype(np.int32),
        np.array([w for each in members for w in each], np.int32),
        usual["hop_s"],
        usual["latency_s"],
    )


def test_a_chain_over_two_workers_costs_hops() -> None:
    tasks = tasks_of([1, 2, 3], [(0, 1, 0), (1, 2, 0)])
    outcome = play(tasks, room_of([[0, 2], [1]], 3, hop_s=0.5))
    assert outcome.end.tolist() == [1, 3.5, 7]
    assert outcome.makespan == 7


def test_an_order_has_a_task_without_duration_before_its_dependent() -> None:
    tasks, room = tasks_of([3, 0], [(1, 0, 0)], queue=[0, 0]), room_of([[0]], 1)
    assert [order.tolist() for order in play(tasks, room).order()] == [[1, 0]]


def test_an_impossible_order_ends_with_unfinished_tasks() -> None:
    tasks = tasks_of([1, 1], [(0, 1, 0)])
    outcome = play(tasks, room_of([[0, 1]], 2), [np.array([1, 0], np.int32)])
    assert (outcome.done, outcome.makespan) == (0, float("inf"))


@given(st.integers(0, 2**32))
def test_a_simulated_plan_follows_the_rules(seed: int) -> None:
    tasks, room, caps = drawn(np.random.default_rng(seed))
    found = play(tasks, room, None, caps)
    check(tasks, room, found)
    for slot, cap in enumerate(caps.tolist()):
        inside = 0
        for t in np.argsort(found.start, kind="stable").tolist():
            if tasks.slot[t] == slot and tasks.take[t] > 0 and found.start[t] >= 0:
                given = (tasks.slot == slot) & (tasks.take < 0) & (found.end >= 0) & (found.end <= found.start[t])
                assert inside + tasks.take[given].sum() < cap
                inside += tasks.take[t]
    if found.finished:
        again = play(tasks, room, found.order())
        check(tasks, room, again, delays=True)
        assert again.finished


@given(st.integers(0, 2**32))
def test_inconsistent_task_arrays_are_refused(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tasks, room, caps = drawn(rng)
    name = rng.choice(["next", "queue", "slot"])
    getattr(tasks, name)[rng.integers(len(getattr(tasks, name)))] = rng.choice([-7, 10**6])
    with pytest.raises(ValueError, match="do not fit"):
        play(tasks, room, None, caps)


def drawn(rng: np.random.Generator) -> tuple[Tasks, Room, np.ndarray]:
    """Some tasks, in a room of some workers."""
    count, workers, queues, hosts = (int(n) for n in rng.integers(2, [40, 6, 6, 4]))
    edges = [
        (a, b, float(rng.integers(0, 100))) for a in range(count) for b in range(a + 1, count) if rng.random() < 0.1
    ]
    edges = edges or [(0, 1, 1.0)]
    tasks = tasks_of(
        [float(n) / 8 for n in rng.integers(1, 40, count)],
        edges,
        cores=rng.choice([0.0, 1.0, 2.0], count),
        queue=rng.integers(0, queues, count),
        key=rng.integers(0, 5, count).astype(float),
        slot=rng.integers(-1, 2, count),
        take=rng.choice([-1, 1, 1], count),
        out=rng.integers(0, 9, count).astype(float),
        alloc=rng.integers(0, 9, count).astype(float),
        release=rng.integers(0, 9, count).astype(float),
    )
    mine = [[q for q in range(queues) if rng.random() < 0.5 or q % workers == w] for w in range(workers)]
    room = room_of(
        mine,
        queues,
        [int(h) for h in rng.integers(0, hosts, workers - 1)] + [hosts - 1],
        speed=rng.choice([0.5, 1.0, 2.0], workers),
        host_cores=rng.choice([0.0, 1.0, 2.0], hosts),
        host_rate=rng.choice([0.0, 50.0], hosts),
        hop_s=0.125,
        latency_s=0.25,
    )
    return tasks, room, rng.integers(1, 4, 2).astype(np.int32)


def check(tasks: Tasks, room: Room, found: Outcome, *, delays: bool = False) -> None:
    """Check an outcome by the rules of `pipeline.events`. `delays`: each task's worker was known beforehand."""
    ran, on = np.flatnonzero(found.end >= 0).tolist(), [room.host[w] for w in found.worker]
    assert len(ran) == found.done
    for t in ran:
        worker, queue, limit = found.worker[t], tasks.queue[t], room.host_cores[on[t]]
        assert worker in room.queue_workers[room.queue_at[queue] : room.queue_at[queue + 1]]
        alone, took = tasks.work[t] / room.speed[worker], found.end[t] - found.start[t]
        assert took >= alone - EPSILON_S
        assert took <= alone + EPSILON_S or (limit and tasks.cores[t])  # slower where the cores of a host are shared
    for t in range(len(tasks)):
        for to in tasks.next[tasks.next_at[t] : tasks.next_at[t + 1]].tolist():
            if to in ran:
                hop = room.hop_s if found.worker[t] != found.worker[to] else 0.0
                far = room.latency_s if on[t] != on[to] and room.host_rate[on[t]] else 0.0
                assert found.start[to] >= found.end[t] + (hop + far) * delays - EPSILON_S
    for worker, order in enumerate(found.order()):
        done = [t for t in order.tolist() if found.end[t] >= 0]
        assert all(found.end[a] <= found.start[b] + EPSILON_S for a, b in pairwise(done))
        held = [0.0]
        for t in done:
            held += [held[-1] + tasks.alloc[t], held[-1] + tasks.alloc[t] - tasks.release[t]]
        assert found.peak[worker] == pytest.approx(max(held))
    for host, limit in enumerate(room.host_cores):
        mine = [t for t in ran if on[t] == host]
        computed = sum(tasks.cores[t] * tasks.work[t] / room.speed[found.worker[t]] for t in mine)
        assert not limit or computed <= limit * found.end.max() + EPSILON_S
        if found.finished:
            ends = [max(found.end[tasks.next[tasks.next_at[t] : tasks.next_at[t + 1]]], default=np.inf) for t in mine]
            kept = list(zip(mine, ends, strict=True))
            held = [sum(tasks.out[u] for u, end in kept if found.start[u] <= found.start[t] < end) for t in mine]
            most = [sum(tasks.out[u] for u, end in kept if found.start[u] <= found.start[t] <= end) for t in mine]
            assert max(held, default=0) - EPSILON_S <= found.host_peak[host] <= max(most, default=0) + EPSILON_S
