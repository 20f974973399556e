"""verl: a step of a multimodal batch, its DataProtos by value and by reference. `python -m bench.doors_verl`.

64 prompts of one image of 448 x 448, 8 responses each, every response with its own copy of the pixels, as verl's agent
loop makes them: 2.5 GB of rows. Four rollout workers make them; four data-parallel by two tensor-parallel ranks read
them in three phases. Each path runs in a driver of its own, through verl's RayWorkerGroup, dispatch and collect
functions. `--scale 0.125` is an eighth of the prompts; the full size needs 16 GiB for the path by value.

The time that a call moves data is what it takes beyond what its slowest worker computed: joining and adding up pixels
that it has. `--peer transferqueue` takes the same through TransferQueue's SimpleStorage, as verl's newer trainer does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from bench.measure import Row, row, table, write_json

ROOT = Path(__file__).parents[1]
PROMPTS, RESPONSES = 64, 8
ROLLOUT_WORKERS, DATA, TENSOR, PHASES = 4, 4, 2, 3
BUDGET = "1GiB"
MIB = 1 << 20


def step(path: str, prompts: int) -> dict[str, Any]:
    """One step in this process, as the driver: what it took. Starts and ends Ray and the plane."""
    warnings.simplefilter("ignore")  # verl imports names of Ray's that are deprecated
    import ray
    import transfer_queue as tq
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    import dataplane as dp
    from bench.doors_verl_workers import PATCHES, WIDTH, Consumer, Rollout
    from dataplane.integrations import process
    from dataplane.integrations import ray as nodes
    from dataplane.integrations.verl.proto import put
    from examples.verl_rollout.memory import forget_peak, passed_bytes, peak_bytes, resident_bytes

    def group(workers: int, cls: Any, **arguments: Any) -> Any:
        pool = RayResourcePool([workers], use_gpu=False, max_colocate_count=1)
        made = RayWorkerGroup(pool, RayClassWithInitArgs(cls=ray.remote(cls), **arguments))
        made.start(path)
        return made

    logical = prompts * RESPONSES * PATCHES * WIDTH * 4
    workers = ROLLOUT_WORKERS + DATA * TENSOR
    room = max(2 * logical, 128 * MIB) if path == "plain" else 128 * MIB
    others = 8 if path == "queue" else 1  # verl's own actor; TransferQueue's ask for a processor each
    ray.init(num_cpus=workers + others, include_dashboard=False, object_store_memory=room, log_to_driver=False)
    try:
        if path == "plane":
            nodes.up(dp.NodeConfig(memory=BUDGET))
        elif path == "queue":
            tq.init()
        rollout, consumers = group(ROLLOUT_WORKERS, Rollout), group(DATA * TENSOR, Consumer, tensor=TENSOR)
        batch = _prompts(prompts)
        if path == "plane":
            process.plane()  # connected before it is timed, as everything else
        forget_peak()
        before = resident_bytes()
        moving, computing, passed = [], [], 0

        def call(method: Any, given: Any) -> Any:
            nonlocal passed
            began = time.perf_counter()
            result = method(given)
            taken = time.perf_counter() - began
            computed = max(result.meta_info.pop("metrics")["computed"])
            moving.append(taken - computed)
            computing.append(computed)
            passed += passed_bytes(given) + passed_bytes(result)
            return result

        began = time.perf_counter()
        batch = (put(batch) if path == "plane" else batch).repeat(RESPONSES, interleave=True)
        generate, phase = rollout.generate, consumers.phase
        if path == "queue":
            generate, phase = rollout.generate_into_queue, consumers.phase_from_queue
        made = call(generate, batch)
        batch = made if path == "queue" else batch.union(made)
        stored = process.plane().stats().memory_used if path == "plane" else 0
        values = [call(phase, batch) for _ in range(PHASES)]
        seconds = time.perf_counter() - began
        peak = peak_bytes()
        first = (values[0].get() if path == "plane" else values[0]).batch["values"]
        assert len(set(first.view(prompts, RESPONSES)[:, 0].tolist())) == prompts
        assert bool((first.view(prompts, RESPONSES) == first.view(prompts, RESPONSES)[:, :1]).all())
        return {
            "logical": logical,
            "seconds": seconds,
            "moving_s": moving,
            "computing_s": computing,
            "passed": passed,
            "driver_before": before,
            "driver_peak": peak,
            "peaks": rollout.peak() + consumers.peak(),
            "stored": stored,
        }
    finally:
        process.close()
        if path == "queue":
            tq.close()
        ray.shutdown()


def _prompts(count: int) -> Any:
    import numpy as np
    import torch
    from verl.protocol import DataProto

    images = np.empty(count, object)
    images[:] = list(range(count))
    return DataProto.from_dict({"dummy_tensor": torch.zeros(count, 1)}, {"image": images})


def in_driver(path: str, scale: float) -> dict[str, Any]:
    """The step in a new process, so that its peak is its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VERL_LOGGING_LEVEL": "ERROR"}
    environment.pop("DATAPLANE_ADDRESS", None)
    command = [sys.executable, "-m", "bench.doors_verl", "--driver", path, "--scale", str(scale)]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def rows_of(plain: list[dict[str, Any]], remote: list[dict[str, Any]], queue: list[dict[str, Any]]) -> list[Row]:
    """The promises, of as many runs of each; TransferQueue's where it was run."""
    pairs = list(zip(plain, remote, strict=True))
    peaks = [theirs["driver_peak"] / ours["driver_peak"] for theirs, ours in pairs]
    grown = [_grown(theirs) / max(_grown(ours), MIB) for theirs, ours in pairs]
    stored = [ours["stored"] / ours["logical"] * RESPONSES for ours in remote]
    faster = [sum(theirs["moving_s"]) / sum(ours["moving_s"]) for theirs, ours in pairs]
    a, b = pairs[-1]
    logical = f"{a['logical'] / MIB:.0f} MiB of rows"
    rows = [
        row(
            "driver's peak, by value over by reference",
            peaks,
            at_least=10,
            unit="x",
            detail=f"{a['driver_peak'] / MIB:.0f} and {b['driver_peak'] / MIB:.0f} MiB; {logical}",
        ),
        row(
            "what the step added to it",
            grown,
            at_least=10,
            unit="x",
            detail=f"{_grown(a) / MIB:.0f} and {_grown(b) / MIB:.0f} MiB",
        ),
        row("bytes stored / logical x 8", stored, at_most=1.05, unit="x", detail=f"{b['stored'] / MIB:.0f} MiB"),
        row(
            "time moving data, by value over by reference",
            faster,
            at_least=10,
            unit="x",
            detail=f"{sum(a['moving_s']):.2f} and {sum(b['moving_s']):.2f} s",
        ),
    ]
    if queue:
        faster = [sum(theirs["moving_s"]) / sum(ours["moving_s"]) for theirs, ours in zip(queue, remote, strict=True)]
        detail = f"{sum(queue[-1]['moving_s']):.2f} s"
        rows.append(row("the same of TransferQueue, SimpleStorage", faster, at_least=5, unit="x", detail=detail))
    return rows


def _grown(result: dict[str, Any]) -> float:
    return float(result["driver_peak"] - result["driver_before"])


def main() -> int:
    """Measure, print, write JSON; 1 where a promise is not kept."""
    parser = argparse.ArgumentParser(prog="python -m bench.doors_verl", description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="of 64 prompts (%(default)s)")
    parser.add_argument("--runs", type=int, default=1, help="of each path (%(default)s)")
    parser.add_argument("--json", type=Path, default=Path("bench/results/doors_verl.json"))
    parser.add_argument("--peer", choices=["transferqueue"], help="the same through TransferQueue too")
    parser.add_argument("--driver", choices=["plain", "plane", "queue"], help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.driver:
        print(json.dumps(step(chosen.driver, int(PROMPTS * chosen.scale))), flush=True)
        return 0
    results: dict[str, list[dict[str, Any]]] = {"plane": [], "plain": []} | ({"queue": []} if chosen.peer else {})
    for _ in range(chosen.runs):
        for path, found in results.items():
            found.append(in_driver(path, chosen.scale))
    rows = rows_of(results["plain"], results["plane"], results.get("queue", []))
    print(table(rows))
    for path, found in results.items():
        last = found[-1]
        moving, computing = (", ".join(f"{s:.2f}" for s in last[name]) for name in ("moving_s", "computing_s"))
        print(
            f"{path}: {last['seconds']:.2f} s, moving {moving} s, computing {computing} s;"
            f" {last['passed'] / 1e6:.2f} MB through the driver; workers' peak {max(last['peaks']) / MIB:.0f} MiB"
        )
    write_json(chosen.json, rows, {"scale": chosen.scale, "paths": results})
    print(f"written to {chosen.json}")
    return 0 if all(r.met for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
