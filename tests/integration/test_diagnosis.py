"""Running jobs of real processes, and what is said of them. The whole matrix is `bench.diagnosis`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import dataplane as dp
from bench.diagnosing import roles
from bench.diagnosing.cells import FAULTS, USUAL, Cell, lines_of
from dataplane import cli
from dataplane.diagnosis.command import as_text
from dataplane.diagnosis.diagnosis import diagnosed
from dataplane.diagnosis.graph import GraphRun, between
from dataplane.diagnosis.recorder import recorder
from dataplane.wire.messages import MAX_REPORT, Report
from tests.optional import needs
from tests.processes import StandingNode, Worker, eventually

NODE = {"memory": "64MiB", "spill": 0}
LOOK_S = 3.0


def work(pipe: Any, role: str, address: str, job: dict[str, Any], worker: int) -> None:
    try:
        getattr(roles, role)(address, job, worker)
    except dp.Closed:  # the job is over
        pass


def reported(plane: dp.Plane, role: str) -> bool:
    """Whether a process has reported that consumes by this function."""
    places = [
        place
        for process in between({"nodes": []}, plane.graphs(), 1e9).processes
        for place in process.places
        if place.function == role and place.count > 2
    ]
    return bool(places)


def grpo(node: StandingNode, fault: str, seen: Path) -> GraphRun:
    """A short job with the fault."""
    job = USUAL["grpo"] | {"seed": 1, "workers": 2} | FAULTS[fault].job
    job["reward_s"] *= job["reward_x"]
    with dp.connect(node.address) as plane, ExitStack() as stack:
        stream = plane.stream("rollouts", tasks=["reward", "actor"], max_lag=8)
        for role, count in (("train", 1), ("reward", 1), ("roll_out", 2)):
            for worker in range(count):
                stack.enter_context(Worker(work, role, node.address, job, worker))
        eventually(lambda: reported(plane, "train"), "a step was reported")
        command = ["diagnose", node.address, "--seconds", str(LOOK_S), "--out", str(seen), "--json"]
        assert cli.main(command) == 0
        stream.drop()
    return GraphRun.load(seen)


@pytest.mark.parametrize("fault", ["reward", pytest.param("lock", marks=pytest.mark.long)])
def test_the_slow_line_is_the_first_diagnosed_cause(
    node: StandingNode, fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = grpo(node, fault, tmp_path / "run")
    found = diagnosed(run)
    cell = Cell("grpo", FAULTS[fault], 1, found, run, 0.0)
    assert cell.named, cell.first
    assert cell.line, cell.first
    cause = json.loads(capsys.readouterr().out)["causes"][0]
    assert cause["line"] in lines_of(fault)
    assert cause["chain"][0]["kind"] == "rows"
    assert cause["seconds"] > 0.01


def test_a_diagnosis_without_consumers_is_refused(node: StandingNode, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diagnose", node.address, "--seconds", "0.5"]) == 1
    assert "no process consumes" in capsys.readouterr().err


def test_a_call_that_waits_counts_once(node: StandingNode) -> None:
    """Also where the caller hands what it waits for to the loop."""
    with Worker(calls_that_wait, node.address) as one:  # the places of a process are bounded
        graph = one.hear()
    mine = [place for place in graph["places"] if place[1] == __file__ and place[4] == "append"]
    assert [place[6] for place in mine] == [1, 1]


def calls_that_wait(pipe: Any, address: str) -> None:
    with dp.connect(address) as plane, dp.connect(address) as other:
        stream = plane.stream("s", tasks=["t"], max_rows=1)
        stream.append({"x": [1]})
        late = threading.Timer(0.2, lambda: other.stream("s").consume("t", rows=1, columns=["x"]).ack())
        late.start()
        stream.append({"x": [2]})
        late.join()
        pipe.send(recorder.told())


def test_a_loop_over_a_loader_is_attributed_to_its_task(node: StandingNode) -> None:
    """Its requests are made by another thread."""
    with Worker(loops, node.address) as one:
        graph, role = one.hear()
    (loop,) = [place for place in graph["places"] if place[1] == __file__ and place[4] == "__next__"]
    assert (loop[5]["stream"], loop[5]["task"], loop[6]) == ("s", "t", 6)
    assert role == "t"


def loops(pipe: Any, address: str) -> None:
    with dp.connect(address) as plane:
        stream = plane.stream("s", tasks=["t"])
        stream.append({"x": list(range(10))})
        stream.close()
        assert len(list(dp.loader(stream, "t", rows=2, columns=["x"]))) == 5
        eventually(lambda: reported(plane, "loops"), "it was reported")
        (process,) = between({"nodes": []}, plane.graphs(), 1e9).processes
        pipe.send((recorder.told(), process.role))


# Ranks that learn together over real collectives, one of which is slow.

_RANK = """
import sys, time
import torch, torch.distributed as dist
import dataplane as dp

def compute(rank):
    time.sleep(0.08 if rank else 0.01)  # slow

def learn(address, store, rank):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    gradient = torch.ones(8)
    with dp.connect(address) as plane:
        for delivery in plane.stream("rollouts").deliveries("actor", rows=1, columns=["ids"]):
            compute(rank)
            dist.all_reduce(gradient)  # met

torch.set_num_threads(1)
learn(sys.argv[1], sys.argv[2], int(sys.argv[3]))
"""


@contextmanager
def ranks(code: Path, address: str) -> Iterator[list[int]]:
    """Two ranks; their process ids."""
    code.write_text(_RANK)
    store = str(code.with_suffix(".store"))
    found = [subprocess.Popen([sys.executable, str(code), address, store, str(rank)]) for rank in range(2)]
    try:
        yield [each.pid for each in found]
    finally:
        for each in found:
            each.kill()
            each.wait()


def steps(plane: dp.Plane) -> list[int]:
    """The rounds that processes have reported."""
    run = between({"nodes": []}, plane.graphs(), 1e9)
    return [process.rounds for process in run.processes if process.role == "actor"]


def looked(plane: dp.Plane) -> GraphRun:
    before, began = plane.graphs(), time.monotonic()
    eventually(lambda: time.monotonic() - began > LOOK_S, "time went by")
    return between(before, plane.graphs(), LOOK_S)


@needs("torch")
@pytest.mark.long
def test_a_straggler_rank_in_a_collective_is_diagnosed(tmp_path: Path) -> None:
    code = tmp_path / "ranks.py"
    with StandingNode(tmp_path, memory="64MiB", spill=0) as node, dp.connect(node.address) as plane:
        stream = plane.stream("rollouts", tasks=["actor"])
        stream.append({"ids": list(range(1000))})  # more than are taken
        with ranks(code, node.address) as (_, slow):
            eventually(lambda: len(steps(plane)) == 2 and min(steps(plane)) > 2, "both ranks have reported steps")
            told = diagnosed(looked(plane))
    lines = _RANK.splitlines()
    first = told.causes[0]
    assert first.processes == (slow,), as_text(told)
    assert (first.kind, lines[first.line - 1].partition("# ")[2]) == ("straggler", "slow")
    assert [(link.kind, lines[link.line - 1].partition("# ")[2]) for link in first.chain] == [("collective", "met")]
    assert first.share > 0.2


def test_the_reports_of_all_nodes_may_be_more_than_a_message_holds(planes: list[Any]) -> None:
    def reported() -> int:
        return sum(each["graph"] == large for node in planes[0].graphs()["nodes"] for each in node["clients"])

    large = bytes(MAX_REPORT)
    with ExitStack() as stack:
        for plane in planes:
            for _ in range(12):
                stack.enter_context(dp.connect(plane.address))._inner.connection.tell(Report(large))
        eventually(lambda: reported() == 36, "each client of each node is there")
