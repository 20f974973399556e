"""The cost of recording a pipeline, and a check of its replay: `python -m bench.recording`.

The pipeline is one process. It appends rows (token ids, log-probs, and an image shared by the responses of a prompt),
consumes a step of them as a trainer, and computes for a while. The same steps run with and without a recorder,
alternately. Printed are the ratio of their times, the recorder's processor time over that of all else in the process,
and the bytes of the files over those of the rows. Then the recording is replayed, and every byte is compared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import dataplane as dp

COLUMNS = ["response_ids", "log_probs", "pixel_values", "reward"]


def steps(count: int, prompts: int, samples: int) -> list[dict[str, Any]]:
    """Random rows for each step, as columns."""
    random = np.random.default_rng(0)
    made = []
    for _ in range(count):
        lengths = np.clip(random.lognormal(7.2, 0.8, prompts * samples), 16, 16384).astype(int)
        images = [random.normal(size=(256, 1176)).astype(np.float32) for _ in range(prompts)]
        made.append(
            {
                "response_ids": [random.integers(0, 150_000, length, np.int32) for length in lengths],
                "log_probs": [random.normal(size=length).astype(np.float32) for length in lengths],
                "pixel_values": [images[row // samples] for row in range(prompts * samples)],
                "reward": random.normal(size=prompts * samples),
            }
        )
    return made


def compute(seconds: float) -> None:
    """Compute for about `seconds` of processor time."""
    matrix, end = np.ones((256, 256), np.float32), time.thread_time() + seconds
    while time.thread_time() < end:
        matrix @ matrix


def run(plane: Any, rows: list[dict[str, Any]], samples: int, work_s: float, path: Path | None) -> tuple[float, float]:
    """Seconds of the pipeline, and the recorder's processor time over that of all else in this process. path: the
    recording's directory; None: no recorder."""
    stream = plane.stream("rollouts", ["train", *(["record"] if path else [])])
    recording = stream.record(path, COLUMNS) if path else None
    began, processor = time.perf_counter(), time.process_time()
    for version, columns in enumerate(rows):
        count = len(columns["reward"])
        stream.append(columns, group=[f"{version}-{row // samples}" for row in range(count)], version=version)
        with stream.consume("train", rows=count, min_rows=count, columns=COLUMNS) as delivery:
            batch = delivery.get()
            compute(work_s)
            del batch
    took = time.perf_counter() - began
    stream.close()
    share = 0.0
    if recording is not None:
        recording.wait(600)
        busy = recording.statistics().busy_s
        share = busy / (time.process_time() - processor - busy)
    stream.drop()
    return took, share


def exact(plane: Any, path: Path, rows: list[dict[str, Any]]) -> bool:
    """Whether the replay has every byte that was put."""
    found: dict[tuple[int, int], bytes] = {}
    stream = plane.replay(path, "again", ["check"])
    for delivery in stream.deliveries("check", rows=64, columns=COLUMNS):
        batch = delivery.get()
        values = [batch[name].numpy() for name in COLUMNS]
        for row, (key, version) in enumerate(zip(delivery.keys, delivery.versions, strict=True)):
            data = b"".join(np.asarray(each[row]).tobytes() for each in values)
            found[version, int(key.rpartition(".")[2])] = data
        del batch, values
    stream.drop()
    number, same = 0, True
    for version, columns in enumerate(rows):
        for row in range(len(columns["reward"])):
            same &= found.pop((version, number)) == b"".join(
                np.asarray(columns[name][row]).tobytes() for name in COLUMNS
            )
            number += 1
    return same and not found


def main() -> None:
    """Measure, print, and write JSON to `--json`, if given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--work", type=float, default=1.0, metavar="S", help="processor seconds of a step's training")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    rows = steps(chosen.steps, chosen.prompts, chosen.samples)
    nbytes = sum(sum(np.asarray(each).nbytes for each in values) for columns in rows for values in columns.values())
    ratios, shares, stored = [], [], 0
    same = True
    with dp.connect(config=dp.NodeConfig(memory="1GiB", spill=0)) as plane:
        run(plane, rows[:1], chosen.samples, 0.0, None)  # warm
        for _ in range(chosen.turns):
            directory = Path(tempfile.mkdtemp(prefix="recording-"))
            try:
                without, _ = run(plane, rows, chosen.samples, chosen.work, None)
                took, share = run(plane, rows, chosen.samples, chosen.work, directory)
                ratios.append(took / without)
                shares.append(share)
                stored = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
                same &= exact(plane, directory, rows)
            finally:
                shutil.rmtree(directory)
    told = {
        "pipeline's time, recorded over not": [
            round(statistics.median(ratios), 4),
            *(round(each, 4) for each in sorted(ratios)),
        ],
        "recorder's processor time over all else in the process": [
            round(statistics.median(shares), 4),
            round(max(shares), 4),
        ],
        "MB of rows": round(nbytes / 1e6),
        "files over rows": round(stored / nbytes, 3),
        "replay is what was recorded": same,
        "load": os.getloadavg()[0],
    }
    for name, value in told.items():
        print(f"{name}: {value}")
    if chosen.json:
        chosen.json.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
