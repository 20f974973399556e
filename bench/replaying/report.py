"""The results of a replay. Rows have its times compared with the implied ones, and its memory with the budget. A text
has the waits, bytes and memory of each process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import numpy as np

from bench.measure import Row, row
from bench.replaying.fitting import PROCESS_BYTES
from bench.replaying.implied import Times, error
from bench.replaying.plan import Plan
from bench.replaying.running import Replayed

ERROR = 5.3
"""Per cent: PolyTrace (arXiv 2509.25279) replays with an accuracy of 94.7 %."""

_MIB = 1 << 20
_STALLS = ("rows", "room", "bytes", "ranks", "policy", "check", "compute", "late")


def rows(plan: Plan, implied: Times, found: Sequence[Replayed], budget: int) -> list[Row]:
    """The promises, over all runs of a plan."""
    timed = _asynchronous(plan, implied, found) if plan.max_lag else _synchronous(plan, implied, found)
    return [*timed, _memory(plan, found, budget)]


def _synchronous(plan: Plan, implied: Times, found: Sequence[Replayed]) -> list[Row]:
    """A row for each stage and for the step, with a value for each step of each run."""
    expected = implied.stages(plan)
    replayed = [run.times.stages(plan) for run in found]
    made = []
    for stage in expected[0]:
        pairs = [(run[i][stage], expected[i][stage]) for run in replayed for i in range(len(expected))]
        ours, theirs = (float(median(values)) for values in zip(*pairs, strict=True))
        detail = f"{ours:.2f} s, implied {theirs:.2f}; {len(expected)} steps, {len(found)} runs"
        name = f"{plan.name}: {stage}, time against the trace's"
        made.append(row(name, [error(*pair) for pair in pairs], at_most=ERROR, unit="%", detail=detail))
    return made


def _asynchronous(plan: Plan, implied: Times, found: Sequence[Replayed]) -> list[Row]:
    """A row of the time until all steps were trained, with a value for each run, since steps overlap."""
    ours = [run.times.trained[-1] for run in found]
    expired = "/".join(str(run.times.expired) for run in found)
    lags = [lag for run in found for lag in run.lags]
    detail = f"{median(ours):.2f} s, implied {implied.trained[-1]:.2f}; {len(found)} runs, expired {expired} of "
    detail += f"{plan.rows} rows, implied {implied.expired}; lag {np.mean(lags):.2f}"
    errors = [error(seconds, implied.trained[-1]) for seconds in ours]
    name = f"{plan.name}: {len(plan.trace.steps)} steps, time against the trace's"
    return [row(name, errors, at_most=ERROR, unit="%", detail=detail)]


def _memory(plan: Plan, found: Sequence[Replayed], budget: int) -> Row:
    bound = 1.1 * budget + PROCESS_BYTES * (plan.processes + 1)  # and the node's
    peaks = [run.memory.total / _MIB for run in found]
    shared, own = (max(values) / _MIB for values in zip(*(_parts(run) for run in found), strict=True))
    detail = f"{shared:.0f} MiB shared, budget {budget / _MIB:.0f}; largest process {own:.0f} MiB of its own"
    return row(f"{plan.name}: most memory of all processes", peaks, at_most=bound / _MIB, unit="MiB", detail=detail)


def _parts(run: Replayed) -> tuple[int, int]:
    return run.memory.shared, max(run.memory.own.values())


def stalls(run: Replayed) -> str:
    """A line for each process: seconds by the reason of its waits, MiB read and written, and peak memory."""
    head = f"{'seconds waited for':<16}" + "".join(f"{what:>9}" for what in _STALLS)
    lines = [head + f"{'read MiB':>10}{'written':>9}{'own MiB':>9}{'RSS':>7}"]
    for name in sorted(run.spent):
        spent = run.spent[name]
        line = f"{name:<16}" + "".join(f"{spent.get(what + '_s', 0.0):>9.2f}" for what in _STALLS)
        line += f"{spent['read_bytes'] / _MIB:>10.0f}{spent['written_bytes'] / _MIB:>9.0f}"
        own, resident = run.memory.own.get(name, 0), run.memory.resident.get(name, 0)
        lines.append(line + f"{own / _MIB:>9.0f}{resident / _MIB:>7.0f}")
    node = {name: value / _MIB for name, value in run.node.items() if "bytes" in name or "memory" in name}
    lines.append(
        f"node: peak {node['memory_peak']:.0f} MiB, put {node['put_bytes']:.0f}, spilled {node['spilled_bytes']:.0f}, "
        f"read back {node['restored_bytes']:.0f}; {run.node['waits']} waits for memory, {run.node['waited_s']:.2f} s; "
        f"own {run.memory.own.get('node', 0) / _MIB:.0f} MiB"
    )
    return "\n".join(lines)


def content(plan: Plan, implied: Times, found: Sequence[Replayed]) -> dict[str, Any]:
    """The content of the JSON: the plan, and each run's figures."""
    settings: dict[str, Any] = {name: value for name, value in vars(plan).items() if isinstance(value, int | float)}
    settings |= {name: asdict(getattr(plan, name)) for name in ("pace", "reference", "trainer")}
    settings |= {"trace": plan.trace.name, "steps": len(plan.trace.steps), "rows": plan.rows}
    return {"plan": settings, "implied": _times(plan, implied), "runs": [_run(plan, run) for run in found]}


def _run(plan: Plan, run: Replayed) -> dict[str, Any]:
    return _times(plan, run.times) | {
        "spent": run.spent,
        "memory": asdict(run.memory),
        "node": run.node,
        "lags": run.lags,
        "seconds": run.seconds,
    }


def _times(plan: Plan, times: Times) -> dict[str, Any]:
    stages = [] if plan.max_lag else times.stages(plan)
    return {"stages": stages, "trained": times.trained, "expired": times.expired}
