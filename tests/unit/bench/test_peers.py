"""Systems side by side: the rows, the room, the promises; and whole cycles of real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.peers import workloads
from bench.peers.children import Failed
from bench.peers.cycle import Cycle
from bench.peers.environments import environment
from bench.peers.room import GIB, Room, TooLittle, check
from bench.peers.systems import SYSTEMS
from bench.peers.targets import faster, targets
from bench.peers.work import Share
from bench.peers.workloads import Workload
from tests.cases import each_case

SHARE = Share(inputs=(5, 3), patches=(2, 4), responses=((7, 2), (1, 9)))
SMALL = Workload("small", "a few rows", (SHARE, SHARE), 2)


def test_too_little_memory_is_said_with_the_scale_that_would_fit() -> None:
    whole = [workloads.workload("video", 1.0)]
    with pytest.raises(TooLittle, match=r"needs 1\d\d\.\d GiB of memory, and 16\.0 are free; --scale 1/16 would fit"):
        check(whole, Room(16 * GIB, 64 * GIB, 900 * GIB, 900 * GIB), 0)
    with pytest.raises(TooLittle, match="no scale of the video task would fit"):
        check(whole, Room(GIB, 64 * GIB, 900 * GIB, 900 * GIB), 0)


def _measured(step: float, cpu: float) -> dict[str, Any]:
    return {"step_s": [step] * 3, "read_s": [step + 1] * 3, "cpu_s": [cpu] * 3, "moved_bytes": 10**9}


def test_promises_are_ratios_and_count_where_another_is_faster() -> None:
    measured = {
        "dataplane": {"video": _measured(1.0, 1.0), "math": _measured(1.0, 1.0)},
        "ray": {"video": _measured(1.5, 4.0), "math": _measured(0.5, 4.0)},
    }
    times, processor, lost = targets(measured)
    assert (times.value, times.met) == (1.5, False)
    assert (processor.value, processor.met) == (0.25, True)
    assert (lost.value, lost.met) == (1.0, False)
    assert [(entry["workload"], entry["system"], entry["what"]) for entry in faster(measured)] == [
        ("math", "ray", "put and get"), ("math", "ray", "put, get and every byte read"),
    ]  # fmt: skip


@pytest.mark.long
@each_case("name", ["dataplane", "controller"])
def test_what_arrives_is_what_was_sent(name: str, tmp_path: Path) -> None:
    where = environment(SYSTEMS[name])
    with Cycle(name, where.python, where.env, tmp_path, 64 << 20) as cycle:
        measured = cycle.measure(SMALL, 2)
    assert len(measured["step_s"]) == 2
    assert measured["moved_bytes"] == 2 * 2 * SHARE.nbytes
    assert 0 < measured["idle_bytes"] <= measured["peak_bytes"]
    assert all(read > step > 0 for read, step in zip(measured["read_s"], measured["step_s"], strict=True))


def test_rows_that_differ_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = environment(SYSTEMS["controller"])
    with Cycle("controller", where.python, where.env, tmp_path, 64 << 20) as cycle:
        once = cycle._once

        def other(workload: Workload, digests: list[list[str]]) -> dict[str, float]:
            return once(workload, [digests[0][::-1], digests[1]])

        monkeypatch.setattr(cycle, "_once", other)
        with pytest.raises(Failed, match="what arrived is not what was sent"):
            cycle.measure(SMALL, 1)
