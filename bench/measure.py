"""Results of benchmarks: medians with their spread, the machine and the commit, as a table and as JSON.

A `Row` is one promise: the measured value, its bound, and whether it is kept. The value is the median of the runs, and
the spread is the least and the most of them.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One promise: `value`, the median of `runs`, is at most `bound` if `below`, else at least `bound`."""

    name: str
    value: float
    bound: float
    unit: str
    below: bool
    runs: list[float] = field(default_factory=list)
    detail: str = ""

    @property
    def met(self) -> bool:
        """Whether the promise is kept."""
        return self.value <= self.bound if self.below else self.value >= self.bound


def row(
    name: str,
    runs: Sequence[float],
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    unit: str,
    detail: str = "",
) -> Row:
    """The promise that the median of the runs is `at_most` or `at_least` a bound; with neither, at least 0."""
    values = [float(run) for run in runs]
    below = at_most is not None
    bound = (at_most if below else at_least) or 0.0
    return Row(name, statistics.median(values), bound, unit, below, values, detail)


def timed(work: Callable[[], Any]) -> float:
    """Seconds that the call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def table(rows: Sequence[Row]) -> str:
    """The rows as text: value, bound, spread, kept or not."""
    width = max(len(r.name) for r in rows)
    lines = []
    for r in rows:
        sign = "<=" if r.below else ">="
        spread = f"{min(r.runs):.4g}..{max(r.runs):.4g}" if len(r.runs) > 1 else ""
        verdict = "met" if r.met else "NOT MET"
        value = f"{r.value:>9.4g} {r.unit:<6} {sign} {r.bound:<6.4g}"
        lines.append(f"{r.name:<{width}}  {value} {verdict:<8} {spread:<18} {r.detail}")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """The machine and software: processors, memory, kernel, Python, versions of packages, the commit, and the time."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for package in ("rollout-dataplane", "numpy", "pyarrow", "torch", "ray", "TransferQueue"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": commit.stdout.strip(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def write_json(path: Path, rows: Sequence[Row], extra: dict[str, Any]) -> None:
    """Write the rows with all runs, the machine, and `extra` to a file. Creates its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine(), "rows": [asdict(r) | {"met": r.met} for r in rows], **extra}
    path.write_text(json.dumps(content, indent=2) + "\n")


def finished(path: Path, rows: Sequence[Row], extra: dict[str, Any]) -> int:
    """Write the rows as `write_json`, and say so. Returns the exit code: 1 if a promise is not kept, else 0."""
    write_json(path, rows, extra)
    print(f"written to {path}")
    return 0 if all(each.met for each in rows) else 1


def measured(measurements: Iterable[Callable[[Path], list[Row]]], scratch: Path) -> list[Row]:
    """The rows of the measurements, one after another. Prints those of each."""
    rows: list[Row] = []
    for measurement in measurements:
        found = measurement(scratch)
        rows += found
        print(table(found), flush=True)
    return rows
