"""What every benchmark needs: medians with their spread, the machine and the commit, a table and JSON.

A `Row` is one promise: what was measured, against which limit or bound, and whether it is kept. Rates and ratios
are medians of at least five runs; the spread is the least and the most of them.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One promise. `value` is to be at most `bound` if `below`, else at least; `runs` are the single values."""

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
    """The promise that the median of the runs is at most, or at least, so much."""
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
    """What ran it: processors, memory, kernel, Python, the versions that matter, the commit."""
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
    """Keep the rows, every run of them, with what ran them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine(), "rows": [asdict(r) | {"met": r.met} for r in rows], **extra}
    path.write_text(json.dumps(content, indent=2) + "\n")
