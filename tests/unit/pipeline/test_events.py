"""Playing tasks through: what costs time and memory, and that both ways of doing it agree."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.pipeline import events
from dataplane.pipeline.events import Outcome, Room, Tasks, play

WAYS = ["python", *(["extension"] if events._events is not None else [])]


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


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "python":
        monkeypatch.setattr(events, "_events", None)
    return request.param


@pytest.mark.usefixtures("way")
class TestPlay:
    def test_a_chain_over_two_workers_costs_hops(self) -> None:
        tasks = tasks_of([1, 2, 3], [(0, 1, 0), (1, 2, 0)])
        outcome = play(tasks, room_of([[0, 2], [1]], 3, hop_s=0.5))
        assert outcome.end.tolist() == [1, 3.5, 7]
        assert outcome.makespan == 7

    def test_memory_is_counted_until_the_last_that_needs_it_has_ended(self) -> None:
        tasks = tasks_of([1, 1, 1], [(0, 2, 0), (1, 2, 0)], out=[10, 20, 5], alloc=[1, 2, 0], release=[0, 0, 3])
        outcome = play(tasks, room_of([[0, 1, 2]], 3))
        assert outcome.host_peak.tolist() == [35]
        assert outcome.peak.tolist() == [3]

    def test_an_impossible_order_ends_with_unfinished_tasks(self) -> None:
        tasks = tasks_of([1, 1], [(0, 1, 0)])
        outcome = play(tasks, room_of([[0, 1]], 2), [np.array([1, 0], np.int32)])
        assert (outcome.done, outcome.makespan) == (0, float("inf"))


@pytest.mark.skipif("extension" not in WAYS, reason="the extension was not built: no C compiler")
class TestExtension:
    @given(st.integers(0, 2**32), st.booleans())
    def test_the_extension_and_the_plain_simulation_give_the_same_outcome(self, seed: int, ordered: bool) -> None:
        rng = np.random.default_rng(seed)
        tasks, room, caps = drawn(rng)
        found = played(tasks, room, None, caps, extension=True)
        same(found, played(tasks, room, None, caps, extension=False))
        if ordered and found.finished:
            again = played(tasks, room, found.order(), None, extension=True)
            same(again, played(tasks, room, found.order(), None, extension=False))

    @given(st.integers(0, 2**32))
    def test_inconsistent_task_arrays_are_refused(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        tasks, room, caps = drawn(rng)
        name = rng.choice(["next", "queue", "slot"])
        getattr(tasks, name)[rng.integers(len(getattr(tasks, name)))] = rng.choice([-7, 10**6])
        with pytest.raises(ValueError, match="do not fit"):
            played(tasks, room, None, caps, extension=True)


def drawn(rng: np.random.Generator) -> tuple[Tasks, Room, np.ndarray]:
    """Some tasks, in a room of some workers."""
    count, workers, queues, hosts = (int(n) for n in rng.integers(2, [40, 6, 6, 4]))
    edges = [
        (a, b, float(rng.integers(0, 100))) for a in range(count) for b in range(a + 1, count) if rng.random() < 0.1
    ]
    edges = edges or [(0, 1, 1.0)]
    tasks = tasks_of(
        [float(n) / 8 for n in rng.integers(0, 40, count)],
        edges,
        cores=rng.choice([0.0, 1.0, 2.0], count),
        queue=rng.integers(0, queues, count),
        key=rng.integers(0, 5, count).astype(float),
        slot=rng.integers(-1, 2, count),
        take=rng.choice([-1, 0, 1], count),
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
    return tasks, room, rng.integers(2, 6, 2).astype(np.int32)


def played(tasks: Tasks, room: Room, order: list[np.ndarray] | None, caps: object, *, extension: bool) -> Outcome:
    before = events._events
    try:
        events._events = before if extension else None
        return play(tasks, room, order, caps)  # type: ignore[arg-type]
    finally:
        events._events = before


def same(a: Outcome, b: Outcome) -> None:
    assert a.done == b.done
    for name in ("worker", "start", "end", "peak", "host_peak"):
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), atol=1e-6, err_msg=name)
