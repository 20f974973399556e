"""Measures put and get of 288 MiB by Ray and TransferQueue in the benchmark's own process, in one run with dataplane.

A peer is used by its public calls, in the environment of the benchmark. A peer that is not installed, or fails, is
reported with the reason.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import dataplane as dp
from bench import workload

RUNS = 5
Cycle = Callable[[dict[str, Any]], tuple[float, float]]


def _dataplane(scratch: Path) -> tuple[Cycle, Callable[[], None]]:
    plane = dp.connect(config=dp.NodeConfig(memory="1GiB", spill_dir=scratch))

    def cycle(columns: dict[str, Any]) -> tuple[float, float]:
        began = time.perf_counter()
        ref = plane.put(columns)
        middle = time.perf_counter()
        batch = plane.get(ref)
        arrays = [batch[name].numpy() for name in batch]
        ended = time.perf_counter()
        del batch, arrays
        plane.free(ref)
        return middle - began, ended - middle

    return cycle, plane.close


def _ray(scratch: Path) -> tuple[Cycle, Callable[[], None]]:
    import ray

    ray.init(num_cpus=2, object_store_memory=1 << 30, include_dashboard=False, log_to_driver=False)

    def cycle(columns: dict[str, Any]) -> tuple[float, float]:
        began = time.perf_counter()
        refs = {name: ray.put(values) for name, values in columns.items()}
        middle = time.perf_counter()
        arrays = ray.get(list(refs.values()))
        ended = time.perf_counter()
        del arrays, refs
        return middle - began, ended - middle

    return cycle, ray.shutdown


def _transferqueue(scratch: Path) -> tuple[Cycle, Callable[[], None]]:
    import ray
    import torch
    import transfer_queue as tq
    from tensordict import TensorDict

    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)  # its actors require one processor each
    tq.init()

    def cycle(columns: dict[str, Any]) -> tuple[float, float]:
        rows = len(next(iter(columns.values())))
        fields = TensorDict({name: torch.from_numpy(v) for name, v in columns.items()}, batch_size=[rows])
        keys = [str(i) for i in range(rows)]
        began = time.perf_counter()
        tq.kv_batch_put(keys, "bench", fields, tags=[{} for _ in keys])
        middle = time.perf_counter()
        tq.kv_batch_get(list(tq.kv_list("bench")["bench"]), "bench")
        ended = time.perf_counter()
        tq.kv_clear(keys, "bench")
        return middle - began, ended - middle

    def stop() -> None:
        tq.close()
        ray.shutdown()

    return cycle, stop


PEERS: dict[str, tuple[str, Callable[[Path], tuple[Cycle, Callable[[], None]]]]] = {
    "ray": ("pip install 'ray[default]'", _ray),
    "transferqueue": ("pip install TransferQueue", _transferqueue),
}


def compare(names: list[str], scratch: Path) -> dict[str, Any]:
    """By system: GB/s of put and get of 288 MiB, medians of `RUNS` cycles after one that warms up, or the reason why
    there are none."""
    columns = workload.dense()
    size = workload.nbytes(columns)
    found: dict[str, Any] = {}
    for name, (how, start) in {"dataplane": ("", _dataplane), **{n: PEERS[n] for n in names}}.items():
        try:
            cycle, stop = start(scratch)
        except ImportError:
            found[name] = {"error": f"not installed here; {how}"}
            continue
        try:
            cycle(columns)
            runs = [cycle(columns) for _ in range(RUNS)]
            found[name] = {
                "put_gb_s": size / median(put for put, _ in runs) / 1e9,
                "get_gb_s": size / median(get for _, get in runs) / 1e9,
                "runs_s": runs,
            }
        except Exception:  # the boundary: a peer's failure is a result
            found[name] = {"error": traceback.format_exc(limit=1).strip().splitlines()[-1]}
        finally:
            stop()
    return found


def table(found: dict[str, Any]) -> str:
    """The rates as a table, with the ratio of dataplane's rates to each peer's."""
    ours = found["dataplane"]
    lines = [f"{'288 MiB':<14} {'put':>10} {'get':>12}   ours, times as fast"]
    for name, result in found.items():
        if "error" in result:
            lines.append(f"{name:<14} {result['error']}")
            continue
        times = f"{ours['put_gb_s'] / result['put_gb_s']:.1f} x put, {ours['get_gb_s'] / result['get_gb_s']:.0f} x get"
        lines.append(f"{name:<14} {result['put_gb_s']:>5.1f} GB/s {result['get_gb_s']:>7.1f} GB/s   {times}")
    return "\n".join(lines)
