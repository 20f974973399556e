"""verl's own trainer over each storage: a step of images. `python -m bench.doors_fit`.

64 prompts of one image of 448 x 448, 8 responses each, two steps of verl's V1 trainer from its command line; what the
model generates and computes is made up (`tests/integrations/verl/fit`). `--scale 0.125 --side 112` is a small one; the
full size needs 24 GiB for SimpleStorage. Each storage by turns, in a Ray of its own.

Storage's share of the steps is the time in which any process of the run was in a call of storage: the trainer, an
agent loop, or `tqbridge` in a rank; looking for finished rows, which the trainer does while it has nothing else to do,
is left out. Peaks are of the processes' own memory, beyond what they had as training began; memory that they share
is counted once, as what the node stores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from bench.measure import Row, row, table, write_json

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/integrations/verl"))  # as verl's processes import it

from fit.model import make_data, make_model
from fit.run import STORES, Job

PROMPTS, RESPONSES, STEPS = 64, 8, 2
SIDE, PATCH, WIDTH = 448, 14, 1176
MIB = 1 << 20
EVERY_S = 0.2
_ROLES = {"TaskRunner": "driver", "WorkerDict": "worker", "AgentLoop": "agent loop", "SimpleStorage": "unit"}


class Memory:
    """The private memory of a run's processes, by role, while it runs."""

    def __init__(self) -> None:
        self.samples: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
        self.shared = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at them until the block ends."""
        ended = threading.Event()
        watching = threading.Thread(target=self._watch, args=(ended,))
        watching.start()
        yield
        ended.set()
        watching.join()

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(EVERY_S):
            for process in psutil.Process().children(recursive=True):
                try:
                    title = "".join(process.cmdline())
                    role = next((role for name, role in _ROLES.items() if name in title), None)
                    if role is not None:
                        memory = process.memory_info()
                        self.samples[role, process.pid].append((time.monotonic(), memory.rss - memory.shared))
                    elif "dataplane" in title and "node" in title:
                        self.shared = max(self.shared, process.memory_info().shared)
                except psutil.NoSuchProcess:
                    continue

    def grown(self, role: str, began: float) -> int:
        """The most that a process of this role took beyond what it had then."""
        found = [0]
        for (of, _), samples in self.samples.items():
            if of == role:
                before = [size for when, size in samples if when <= began]
                found.append(max(size for _, size in samples) - (before[-1] if before else samples[0][1]))
        return max(found)


def measure(job: Job) -> dict[str, Any]:
    """Run it; what it took."""
    memory = Memory()
    with memory.watched():
        job.run(timeout=3600)
    calls = [json.loads(line) for path in job.record.glob("*.jsonl") for line in path.read_text().splitlines()]
    began = min(start for name, partition, start, _ in calls if name == "kv_batch_put" and partition == "train")
    spans = sorted((start, end) for name, _, start, end in calls if start >= began and name != "kv_list")
    lines = map(json.loads, (job.directory / "metrics.jsonl").read_text().splitlines())
    step = sum(line["data"].get("timing_s/step", 0.0) for line in lines)
    return {
        "step_s": step,
        "storage_s": _covered(spans),
        "stored": memory.shared,
        **{role: memory.grown(role, began) for role in ("driver", "worker", "agent loop", "unit")},
    }


def _covered(spans: list[tuple[float, float]]) -> float:
    """Seconds that any of the spans covers."""
    covered = until = 0.0
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered


def rows_of(found: dict[str, list[dict[str, Any]]], logical: int) -> list[Row]:
    """The promises, each of ours over SimpleStorage's."""
    rows = []
    theirs = found["SimpleStorage"]
    for store in STORES[1:]:
        pairs = list(zip(found[store], theirs, strict=True))
        shares = [(a["storage_s"] / a["step_s"]) / (b["storage_s"] / b["step_s"]) for a, b in pairs]
        detail = ", ".join(f"{a['storage_s']:.2f} of {a['step_s']:.2f} s" for a in pairs[0])
        rows.append(row(f"{store}: storage's share", shares, at_most=1 / 5, unit="x", detail=detail))
        stored = [a["stored"] / logical * RESPONSES for a, _ in pairs]
        detail = f"{pairs[0][0]['stored'] / MIB:.0f} of {logical / MIB:.0f} MiB"
        rows.append(row(f"{store}: stored / logical x 8", stored, at_most=1.05, unit="x", detail=detail))
        for role in ("driver", "worker"):
            grown = [max(a[role], MIB) / max(b[role], MIB) for a, b in pairs]
            detail = ", ".join(f"{each[role] / MIB:.0f} MiB" for each in pairs[0])
            rows.append(row(f"{store}: {role}'s peak", grown, at_most=1 / 5, unit="x", detail=detail))
    return rows


def main() -> int:
    """Measure, print, write JSON; 1 where a promise is not kept."""
    parser = argparse.ArgumentParser(prog="python -m bench.doors_fit", description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="of 64 prompts (%(default)s)")
    parser.add_argument("--side", type=int, default=SIDE, help="of an image, in pixels (%(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="of each storage (%(default)s)")
    parser.add_argument("--json", type=Path, default=Path("bench/results/doors_fit.json"))
    chosen = parser.parse_args()
    prompts = int(PROMPTS * chosen.scale)
    logical = prompts * RESPONSES * (chosen.side // PATCH) ** 2 * WIDTH * 4
    found: dict[str, list[dict[str, Any]]] = {store: [] for store in STORES}
    with tempfile.TemporaryDirectory() as held:
        directory = Path(held)
        make_model(directory / "model", images=True)
        make_data(directory / "train.parquet", prompts * STEPS, image_side=chosen.side)
        make_data(directory / "validation.parquet", 1, image_side=chosen.side, first=prompts * STEPS)
        files = directory / "model", directory / "train.parquet", directory / "validation.parquet"
        for number in range(chosen.runs):
            for store, results in found.items():
                own = directory / f"{store}_{number}"
                own.mkdir()
                job = Job(
                    *files,
                    own,
                    store,
                    prompts=prompts,
                    responses=RESPONSES,
                    steps=STEPS,
                    ranks=2,
                    prompt_length=512,
                    memory="4GiB",
                    timed=True,
                    overrides=("trainer.val_before_train=false", "trainer.test_freq=-1"),
                )
                results.append(measure(job))
                print(f"{store}: {json.dumps(results[-1])}", flush=True)
    rows = rows_of(found, logical)
    print(table(rows))
    write_json(chosen.json, rows, {"scale": chosen.scale, "side": chosen.side, "stores": found})
    print(f"written to {chosen.json}")
    return 0 if all(r.met for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
