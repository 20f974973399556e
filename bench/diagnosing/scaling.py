"""Scaling loss: runs a job with few workers and with many, and compares the runs like `--compare` does.

Each worker of the pipeline `agent` appends a row every 0.18 s. The learner takes hardly any time. The role with the
fault processes more rows a second than two workers append, and fewer than eight: it limits only the large run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bench.diagnosing import cells
from bench.diagnosing.cells import FAULTS, Cell, Fault
from dataplane.diagnosis.causes import Diagnosis
from dataplane.diagnosis.diagnosis import compared

WORKERS = (2, 8)
_RATES = {"rollout_s": 0.18, "train_s": 0.005, "reward_s": 0.005, "limits": 64}

PLANTED = {
    "reward": replace(FAULTS["reward"], job=_RATES | {"reward_s": 0.045}),
    "lock": replace(FAULTS["lock"], job=_RATES | {"lock_s": 0.05}),
    "ack": replace(FAULTS["ack"], job=_RATES | {"ack_s": 0.05, "limits": 16}),
}
"""Faults of roles that process 20 to 25 rows a second, while two workers append 11, and eight 44."""


@dataclass
class Pair:
    """The comparison of two runs, and the rows a second of each."""

    fault: Fault
    seed: int
    found: Diagnosis
    rates: tuple[float, float]

    @property
    def first(self) -> str:
        """The first cause, and the gain by four times the workers, in one line of text."""
        gained = f"{self.rates[1] / max(self.rates[0], 1e-9):.1f} times the rows"
        if not self.found.causes:
            return f"nothing; {gained}"
        cause = self.found.causes[0]
        return f"{cause.kind} {cause.role} {cause.function}:{cause.line} {cause.share:.0%}; {gained}"

    @property
    def named(self) -> bool:
        """Whether the planted cause is first."""
        causes = self.found.causes
        return bool(causes) and causes[0].kind in self.fault.kinds and causes[0].role in self.fault.roles

    @property
    def line(self) -> bool:
        """Whether the first cause is at a marked line."""
        return bool(self.found.causes) and self.found.causes[0].line in cells.lines_of(self.fault.at)


def run(fault: Fault, seed: int, seconds: float, keep: Path | None = None) -> Pair:
    """Run and compare both jobs, one after the other. `keep`: the directory in which their runs are saved, for
    `dataplane diagnose`."""
    small, large = (_one(fault, seed, seconds, workers) for workers in WORKERS)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for cell, workers in zip((small, large), WORKERS, strict=True):
            cell.run.save(keep / f"{fault.name}-{seed}-{workers}.json")
    found = compared(small.run, large.run)
    return Pair(fault, seed, found, (small.found.steps / small.run.seconds, large.found.steps / large.run.seconds))


def _one(fault: Fault, seed: int, seconds: float, workers: int) -> Cell:
    return cells.run("agent", fault, seed, seconds, workers=workers)
