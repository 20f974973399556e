"""Ranks that learn together over real collectives, one of which is slow."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import dataplane as dp
from dataplane.diagnosis.command import as_text
from dataplane.diagnosis.diagnosis import diagnosed
from dataplane.diagnosis.graph import GraphRun, between
from tests.optional import needs
from tests.processes import StandingNode, eventually

pytestmark = needs("torch")

LOOK_S = 3.0
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
