"""The targets of the comparison with other systems, as rows, and the cases in which another system is faster.

Seconds are medians. The runs of a ratio are the other system's, each over our median. A system that was not measured
has no row.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from bench.measure import Row, row
from bench.peers.systems import SYSTEMS

OURS = "dataplane"
STEP = "video"
#: Workloads whose put and get must be faster by the bounds of the systems.
BOUND = (STEP, "r3", "top_k", "hidden_states")
#: The least bytes of a workload whose processor time differs from noise.
LEAST_BYTES = 100_000_000
KINDS = {"step_s": "put and get", "read_s": "put, get and every byte read"}

Measured = dict[str, dict[str, Any]]  # by system, what `Cycle.measure` gave by workload


def targets(measured: Measured) -> list[Row]:
    """The targets for all systems that were measured."""
    rows: list[Row] = []
    for name in BOUND:
        if name in measured.get(OURS, {}):
            rows += _bounds(measured, name)
    if STEP not in measured.get(OURS, {}):
        return rows
    ours = measured[OURS][STEP]
    others = {name: of[STEP] for name, of in measured.items() if name != OURS and STEP in of}
    if others:
        best = min(others, key=lambda name: median(others[name]["cpu_s"]))
        least = median(others[best]["cpu_s"])
        gb = ours["moved_bytes"] / 1e9
        detail = f"{median(ours['cpu_s']) / gb:.3f} and {least / gb:.3f} ({SYSTEMS[best].title}) processor s a GB"
        ratios = [run / least for run in ours["cpu_s"]]
        rows.append(row("processor seconds a GB, over the best other's", ratios, at_most=0.5, unit="x", detail=detail))
    if others:
        count = float(len({entry["workload"] for entry in faster(measured)}))
        rows.append(Row("workloads on which another is faster", count, 0.0, "", True, [count]))
    return rows


def _bounds(measured: Measured, workload: str) -> list[Row]:
    """For each other system, the ratio of its seconds a step to ours."""
    ours, rows = measured[OURS][workload], []
    moved = "a step's data moved" if workload == STEP else f"{workload} moved"
    for name, of in measured.items():
        if name == OURS or workload not in of:
            continue
        theirs = of[workload]
        ratios = [run / median(ours["step_s"]) for run in theirs["step_s"]]
        detail = f"{median(ours['step_s']):.3f} and {median(theirs['step_s']):.3f} s"
        title = f"{moved}: {SYSTEMS[name].title}'s seconds over ours"
        rows.append(row(title, ratios, at_least=SYSTEMS[name].bound, unit="x", detail=detail))
    return rows


def faster(measured: Measured) -> list[dict[str, Any]]:
    """The cases in which another system's median is less than ours: workload, system, kind of time, and both
    seconds."""
    found = []
    for workload, ours in measured.get(OURS, {}).items():
        for name, of in measured.items():
            for kind, what in KINDS.items():
                if name == OURS or workload not in of:
                    continue
                mine, theirs = median(ours[kind]), median(of[workload][kind])
                if theirs < mine:
                    found.append(
                        {"workload": workload, "system": name, "what": what, "ours_s": mine, "theirs_s": theirs}
                    )
    return found
