"""verl: a step of a multimodal batch, its DataProtos by value and by reference. `python -m bench.doors_verl`.

64 prompts have one image of 448 x 448 and 8 responses each. As in verl's agent loop, every response has its own copy of
the pixels: 2.5 GB of rows. Four rollout workers make them. Four data-parallel by two tensor-parallel ranks read them in
three phases. All paths alternate, with the same worker groups of verl and its dispatch and collect functions. `--scale
0.125` is an eighth of the prompts; the full size needs 32 GiB for the path by value.

The moving time of a call is its time without the computing of its slowest worker, which concatenates and sums pixels.
`--peer transferqueue` sends the same through TransferQueue's SimpleStorage, as verl's newer trainer does. With
`--not-by-value` the full size fits into 24 GiB.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from verl.protocol import DataProto

import dataplane as dp
from bench.doors_verl_workers import PARTITION, PATCHES, WIDTH
from bench.measure import Row, finished, row, table
from dataplane.integrations import process
from dataplane.integrations import ray as nodes
from dataplane.integrations.verl.proto import put
from examples.verl_rollout.memory import forget_peak, passed_bytes, peak_bytes, resident_bytes

ROOT = Path(__file__).parents[1]
PROMPTS, RESPONSES = 64, 8
ROLLOUT_WORKERS, DATA, TENSOR, PHASES = 4, 4, 2, 3
BUDGET = "1GiB"
MIB = 1 << 20


class Step:
    """The worker groups, which run a step by each path. Ray must be initialised, and the plane started."""

    def __init__(self, prompts: int, *, queue: bool) -> None:
        from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

        from bench.doors_verl_workers import Consumer, Rollout

        def group(workers: int, cls: Any, **arguments: Any) -> Any:
            pool = RayResourcePool([workers], use_gpu=False, max_colocate_count=1)
            made = RayWorkerGroup(pool, RayClassWithInitArgs(cls=ray.remote(cls), **arguments))
            made.start(queue)
            return made

        self._prompts = prompts
        self._rollout = group(ROLLOUT_WORKERS, Rollout)
        self._consumers = group(DATA * TENSOR, Consumer, tensor=TENSOR)

    def run(self, path: str) -> dict[str, Any]:
        """Run a step by the path "plain", "plane" or "queue". Returns its times in seconds and its memory in bytes."""
        plane = process.plane()
        for group in (self._rollout, self._consumers):
            group.forget_peak()
        forget_peak()
        before, used = resident_bytes(), plane.stats().memory_used
        calls: list[dict[str, float]] = []
        batch = self._batch()
        batch = (put(batch, scope=path) if path == "plane" else batch).repeat(RESPONSES, interleave=True)
        generate, phase = self._rollout.generate, self._consumers.phase
        if path == "queue":
            generate, phase = self._rollout.generate_into_queue, self._consumers.phase_from_queue
        made = _call(generate, batch, calls)
        batch = made if path == "queue" else batch.union(made)
        stored = plane.stats().memory_used - used
        values = [_call(phase, batch, calls) for _ in range(PHASES)]
        peak = peak_bytes()
        self._check((values[0].get() if path == "plane" else values[0]).batch["values"])
        if path == "queue":
            tq.kv_clear(batch.non_tensor_batch["keys"].tolist(), PARTITION)
        plane.free(scope=path)
        return {
            "moving_s": [each["taken"] - each["computed"] for each in calls],
            "computing_s": [each["computed"] for each in calls],
            "passed": sum(each["passed"] for each in calls),
            "driver_before": before,
            "driver_peak": peak,
            "peaks": self._rollout.peak() + self._consumers.peak(),
            "stored": stored,
        }

    def _batch(self) -> DataProto:
        images = np.empty(self._prompts, object)
        images[:] = list(range(self._prompts))
        return DataProto.from_dict({"dummy_tensor": torch.zeros(self._prompts, 1)}, {"image": images})

    def _check(self, values: torch.Tensor) -> None:
        """Check that the rows of a prompt have the same pixels, and other prompts have others."""
        by_prompt = values.view(self._prompts, RESPONSES)
        assert bool((by_prompt == by_prompt[:, :1]).all())
        assert len(by_prompt[:, 0].unique()) == self._prompts


def _call(method: Any, batch: Any, calls: list[dict[str, float]]) -> Any:
    began = time.perf_counter()
    result = method(batch)
    taken = time.perf_counter() - began
    computed = max(result.meta_info.pop("metrics")["computed"])
    calls.append({"taken": taken, "computed": computed, "passed": passed_bytes(batch) + passed_bytes(result)})
    return result


def measure(prompts: int, runs: int, *, plain: bool, queue: bool) -> dict[str, list[dict[str, Any]]]:
    """Run the paths alternately. The path by value is last, since the driver stays large after it."""
    logical = prompts * RESPONSES * PATCHES * WIDTH * 4
    workers = ROLLOUT_WORKERS + DATA * TENSOR
    room = max(3 * logical, 128 * MIB)  # data by value are in Ray's object store
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ.pop("DATAPLANE_ADDRESS", None)
    # verl's own actor and TransferQueue's need processors, too
    ray.init("local", num_cpus=workers + (8 if queue else 1), include_dashboard=False, object_store_memory=room)
    try:
        nodes.up(dp.NodeConfig(memory=BUDGET))
        if queue:
            tq.init()
        step = Step(prompts, queue=queue)
        paths = {"plane": True, "queue": queue, "plain": plain}
        results: dict[str, list[dict[str, Any]]] = {path: [] for path, wanted in paths.items() if wanted}
        for _ in range(runs):
            for path, found in results.items():
                found.append(step.run(path))
                gc.collect()
                print(f"{path}: moving {sum(found[-1]['moving_s']):.2f} s", flush=True)
        return results
    finally:
        process.close()
        if queue:
            tq.close()
        ray.shutdown()


def rows_of(results: dict[str, list[dict[str, Any]]], logical: int) -> list[Row]:
    """The promises: ratios of other paths to ours. The driver's peak is of the first run of each path, since the driver
    stays large after a path by value."""
    plane = results["plane"]
    stored = [each["stored"] / logical * RESPONSES for each in plane]
    rows = [row("stored / logical x 8", stored, at_most=1.05, unit="x", detail=f"{plane[0]['stored'] / MIB:.0f} MiB")]
    if "plain" in results:
        a, b = results["plain"][0], plane[0]
        absolute = (
            f"{a['driver_peak'] / MIB:.0f} and {b['driver_peak'] / MIB:.0f} MiB, for {logical / MIB:.0f} MiB of rows"
        )
        added = f"{_grown(a) / MIB:.0f} and {_grown(b) / MIB:.0f} MiB"
        peak = a["driver_peak"] / b["driver_peak"]
        rows += [
            row("driver's peak, by value", [peak], at_least=10, unit="x", detail=absolute),
            row(
                "what a step adds to it, by value",
                [_grown(a) / max(_grown(b), MIB)],
                at_least=10,
                unit="x",
                detail=added,
            ),
        ]
    for path, name, bound in (("plain", "by value", 10), ("queue", "TransferQueue", 5)):
        pairs = list(zip(results.get(path, []), plane, strict=False))
        if pairs:
            ratios = [_moving(theirs) / _moving(ours) for theirs, ours in pairs]
            medians = [statistics.median(map(_moving, results[which])) for which in (path, "plane")]
            detail = f"{medians[0]:.2f} and {medians[1]:.2f} s"
            rows.append(row(f"moving data, {name}", ratios, at_least=bound, unit="x", detail=detail))
    return rows


def _moving(result: dict[str, Any]) -> float:
    return float(sum(result["moving_s"]))


def _grown(result: dict[str, Any]) -> float:
    return float(result["driver_peak"] - result["driver_before"])


def main() -> int:
    """Measure, print, write JSON. Returns 1 if a promise is not kept, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.doors_verl", description=__doc__.splitlines()[0])
    parser.add_argument("--scale", type=float, default=1.0, help="of 64 prompts (%(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="of each path (%(default)s)")
    parser.add_argument("--json", type=Path, default=Path("bench/results/doors_verl.json"))
    parser.add_argument("--peer", choices=["transferqueue"], help="the same through TransferQueue too")
    parser.add_argument("--not-by-value", action="store_true", help="leave the path through the driver out")
    chosen = parser.parse_args()
    prompts = int(PROMPTS * chosen.scale)
    logical = prompts * RESPONSES * PATCHES * WIDTH * 4
    results = measure(prompts, chosen.runs, queue=chosen.peer is not None, plain=not chosen.not_by_value)
    rows = rows_of(results, logical)
    print(table(rows))
    for path, found in results.items():
        peak, passed = max(max(each["peaks"]) for each in found), found[0]["passed"]
        print(f"{path}: {passed / 1e6:.3f} MB through the driver; workers' peak {peak / MIB:.0f} MiB")
    return finished(chosen.json, rows, {"scale": chosen.scale, "paths": results})


if __name__ == "__main__":
    sys.exit(main())
