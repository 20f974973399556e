"""verl's own trainer over each storage: a step of images. `python -m bench.doors_fit`.

verl's V1 trainer runs three steps from its command line, each of 64 prompts with one image of 448 x 448, and 8
responses to each. The model's outputs are made up (`tests/integrations/verl/fit`). `--scale 0.125 --side 112` is a
small run; the full size needs 24 GiB for SimpleStorage. The storages run alternately, each in a Ray of its own. Image
files are as large as their pixels. With `--smooth` they are JPEG of about a fourteenth of the size, like photographs.

Storage's share of the steps has two parts (`bench.doors_fit_times`). The first is the time in which any process was in
storage or waited for it: the trainer, an agent loop, or `tqbridge` in a rank. The second is the processor time of
storage's threads in the agent loops, which do not wait for them. Two things are left out: the trainer's search for
finished rows, which it makes while idle, and the first step, in which processes start, connect and import.

Peaks are of the processes' private memory, beyond that at the start of training, and include verl's own. `calls` is the
memory that all of the driver's storage calls added until they returned; `gets` is the most that one get of a rank
added. Shared memory is counted once, as the bytes that the node stores when rows are cleared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
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

PROMPTS, RESPONSES, STEPS = 64, 8, 3
SIDE = 448
MIB = 1 << 20
EVERY_S = 0.2
_ROLES = {"TaskRunner": "driver", "WorkerDict": "worker", "AgentLoop": "agent loop", "SimpleStorage": "unit"}


class Memory:
    """Samples of the private memory of a run's processes, by role and process."""

    def __init__(self) -> None:
        self.samples: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Take samples until the block ends."""
        ended = threading.Event()
        watching = threading.Thread(target=self._watch, args=(ended,))
        watching.start()
        try:
            yield
        finally:
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
                except psutil.NoSuchProcess:
                    continue

    def grown(self, role: str, began: float) -> int:
        """The greatest growth of a process of this role, in bytes, since about the time `began` (samples may be seconds
        apart). Processes that started later are left out: a child that a data loader forks has its parent's name, and
        memory of its parent is counted as its own."""
        found = [0]
        for (of, _), samples in self.samples.items():
            if of == role and samples[0][0] <= began:
                _, before = min(samples, key=lambda sample: abs(sample[0] - began))
                found.append(max(size for _, size in samples) - before)
        return max(found)


def measure(job: Job) -> dict[str, Any]:
    """Run the job. Returns its times in seconds and its memory in bytes."""
    memory = Memory()
    with memory.watched():
        job.run(timeout=3600)
    lines = [json.loads(line) for line in (job.directory / "metrics.jsonl").read_text().splitlines()]
    steps = [line["data"]["timing_s/step"] for line in lines if "timing_s/step" in line["data"]]
    found = read(job.record, job.steps)
    return {
        "step_s": sum(steps[1:]),
        "load": round(os.getloadavg()[1], 1),
        **{name: value for name, value in found.items() if name != "began"},
        **{role: memory.grown(role, found["began"]) for role in ("driver", "worker", "agent loop", "unit")},
    }


def read(record: Path, steps: int) -> dict[str, Any]:
    """Summarize the recorded calls of a run. `began` is the time of the first put.

    Without the first step: `storage_s`, seconds in which any process was in storage or waited for it; `beside_s`,
    processor time of storage's threads in processes that did not wait for them; `by_call`, the result of that function.
    Of all steps, in bytes: `stored`, the most in the node at a `kv_clear`; `gets`, the most that a rank's get added to
    its private memory; `calls`, the sum that the driver's calls added; `logical`, the fields that agent loops put in a
    step, on average.
    """
    told = {path: [json.loads(line) for line in path.read_text().splitlines()] for path in record.glob("*.jsonl")}
    calls = [line for lines in told.values() for line in lines if "name" in line]
    train = [call for call in calls if call["partition"] == "train"]
    clears = sorted(call["end"] for call in train if call["name"] == "kv_clear")
    warm = clears[len(clears) // steps - 1]
    spans = [
        (start, end) for call in calls if call["name"] != "kv_list" for start, end in call["spans"] if start >= warm
    ]
    drivers = next(lines for lines in told.values() if any(line.get("name") == "kv_clear" for line in lines))
    beside = 0.0
    for lines in told.values():
        taken = [(line["at"], line["threads"]) for line in lines if "threads" in line]
        before = [seconds for at, seconds in taken if at <= warm]
        if taken:
            beside += taken[-1][1] - (before[-1] if before else 0.0)
    return {
        "by_call": by_call(told, warm),
        "began": min(call["start"] for call in train if call["name"] == "kv_batch_put"),
        "storage_s": covered(spans),
        "beside_s": beside,
        "stored": max((call["stored"] for call in train if call.get("stored")), default=0),
        "logical": sum(call.get("bytes", 0) for call in train) // steps,
        "calls": sum(line.get("private", 0) for line in drivers),
        "gets": max((call["private"] for call in calls if call["name"] == "_meta_to_realdata"), default=0),
    }


def by_call(told: dict[Path, list[dict[str, Any]]], warm: float) -> dict[str, tuple[int, float, float]]:
    """Count and seconds of each call, by the role of its process and without the first step. The third value is the
    processor time of calls that block, or the seconds with an idle loop of calls that are awaited. Of the processes of
    a role, the one with the most seconds counts."""
    found: dict[str, tuple[int, float, float]] = {}
    for lines in told.values():
        names = {line["name"] for line in lines if "name" in line}
        role = "driver" if "kv_clear" in names else "rank" if "_meta_to_realdata" in names else "agent loop"
        for name in names:
            late = [line for line in lines if line.get("name") == name and line["start"] >= warm]
            taken = covered([(start, end) for line in late for start, end in line["spans"] if start >= warm])
            each = len(late), taken, sum(line.get("processor", line.get("idle", 0.0)) for line in late)
            found[f"{role} {name}"] = max(found.get(f"{role} {name}", (0, 0.0, 0.0)), each, key=lambda one: one[1])
    return dict(sorted(found.items()))


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of the spans, in seconds."""
    total = until = 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


Round = dict[str, dict[str, Any]]
"""The results of one run of each storage, by storage."""


def rows_of(rounds: list[Round]) -> list[Row]:
    """The promises. Most are a ratio of ours to SimpleStorage's of the same round."""
    rows = []
    pairs = [(each["Dataplane"], each["SimpleStorage"]) for each in rounds]
    shares = [_share(a) / _share(b) for a, b in pairs]
    detail = ", ".join(f"{a['storage_s']:.2f} + {a['beside_s']:.2f} of {a['step_s']:.2f} s" for a in pairs[0])
    rows.append(row("Dataplane: storage's share", shares, at_most=1 / 5, unit="x", detail=detail))
    stored = [a["stored"] / a["logical"] * RESPONSES for a, _ in pairs]
    detail = f"{pairs[0][0]['stored'] / MIB:.1f} of {pairs[0][0]['logical'] / MIB:.0f} MiB"
    rows.append(row("Dataplane: stored / logical x 8", stored, at_most=1.05, unit="x", detail=detail))
    for role, over, of in (
        ("driver", "driver", "driver, peak"),
        ("calls", "driver", "driver, storage's calls over its peak"),
        ("worker", "worker", "worker, peak"),
        ("gets", "gets", "worker's gets, peak"),
    ):
        grown = [max(a[role], MIB) / max(b[over], MIB) for a, b in pairs]
        detail = f"{pairs[0][0][role] / MIB:.0f} MiB, {pairs[0][1][over] / MIB:.0f} MiB"
        rows.append(row(f"Dataplane: {of}", grown, at_most=1 / 5, unit="x", detail=detail))
    return rows


def calls(rounds: list[Round]) -> str:
    """A text with the seconds and the number of calls, as medians, by storage and call."""
    lines = []
    for store in STORES:
        several = [each[store] for each in rounds if store in each]
        if not several:
            continue
        middle = {name: statistics.median(each[name] for each in several) for name in ("storage_s", "beside_s")}
        share, load = statistics.median(map(_share, several)), statistics.median(each["load"] for each in several)
        lines.append(f"{store}: share {share:.3f}, {middle['storage_s']:.2f} + {middle['beside_s']:.2f} s, load {load}")
        for call in sorted({call for each in several for call in each["by_call"]}):
            found = [each["by_call"][call] for each in several if call in each["by_call"]]
            count, seconds, inside = (statistics.median(values) for values in zip(*found, strict=True))
            lines.append(f"    {call:<40} {count:>6.0f} {seconds:>8.2f} s, of them {inside:.2f}")
    return "\n".join(lines)


def _share(of: dict[str, Any]) -> float:
    return float((of["storage_s"] + of["beside_s"]) / of["step_s"])


def main() -> int:
    """Measure, print, write JSON. Returns 1 if a promise is not kept or a run failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.doors_fit", description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="of 64 prompts (%(default)s)")
    parser.add_argument("--side", type=int, default=SIDE, help="of an image, in pixels (%(default)s)")
    parser.add_argument("--smooth", action="store_true", help="images whose files are small")
    parser.add_argument("--store", choices=STORES, action="append", help="this one alone, or those (all)")
    parser.add_argument("--runs", type=int, default=3, help="of each storage (%(default)s)")
    parser.add_argument("--json", type=Path, default=Path("bench/results/doors_fit.json"))
    chosen = parser.parse_args()
    prompts = int(PROMPTS * chosen.scale)
    rounds: list[Round] = []
    said = {"scale": chosen.scale, "side": chosen.side, "smooth": chosen.smooth, "rounds": rounds}
    with tempfile.TemporaryDirectory() as held:
        directory = Path(held)
        make_model(directory / "model", images=True)
        drawn: dict[str, Any] = {"image_side": chosen.side, "smooth": chosen.smooth}
        make_data(directory / "train.parquet", prompts * STEPS, **drawn)
        make_data(directory / "validation.parquet", 1, first=prompts * STEPS, **drawn)
        files = directory / "model", directory / "train.parquet", directory / "validation.parquet"
        for number in range(chosen.runs):
            rounds.append({})
            for store in chosen.store or STORES:
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
                try:
                    rounds[-1][store] = measure(job)
                except AssertionError as error:  # other runs are still useful
                    print(f"{store}: failed: {error}", flush=True)
                    continue
                print(f"{store}: {json.dumps(rounds[-1][store])}", flush=True)
                write_json(chosen.json, [], said)
    print(calls(rounds))
    if chosen.store:
        return 0
    whole = [each for each in rounds if len(each) == len(STORES)]
    rows = rows_of(whole) if whole else []
    if rows:
        print(table(rows))
    write_json(chosen.json, rows, said)
    print(f"written to {chosen.json}; {len(whole)} of {chosen.runs} rounds were whole")
    return 0 if len(whole) == chosen.runs and all(r.met for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
