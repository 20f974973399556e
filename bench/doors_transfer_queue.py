"""The calls of TransferQueue, by `dataplane` and by TransferQueue itself with its simple storage, in one run.

    python -m bench.doors_transfer_queue

Needs Ray and TransferQueue. Both systems have the same processes, as in TransferQueue's throughput script: a writer and
a reader, each a Ray actor. The batch is the script's small simple case: 1,024 rows of nine fields of 8,192 float32, 288
MiB. Runs alternate between the systems, and each pair gives a ratio: their seconds over ours.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import Row, row, table, write_json

RUNS = 5
ROWS, FIELDS, WIDTH = 1024, 9, 8192
MODULES = {"ours": "dataplane.integrations.transfer_queue", "theirs": "transfer_queue"}


class Stage:
    """A writer or a reader: a process that measures its own calls."""

    def __init__(self, module: str) -> None:
        import torch
        from tensordict import TensorDict

        self._torch, self._of = torch, TensorDict
        self._tq = importlib.import_module(module)
        self._tq.init()
        self._keys = [f"row {i}" for i in range(ROWS)]
        self._batch: Any = None

    def make(self) -> None:
        """Make the batch."""
        torch = self._torch
        fields = {f"field_{i}": torch.randn(ROWS, WIDTH) for i in range(FIELDS)}
        self._batch = self._of(fields, batch_size=[ROWS])

    def put(self) -> float:
        """Seconds to put the batch."""
        began = time.perf_counter()
        self._tq.kv_batch_put(self._keys, "bench", fields=self._batch)
        return time.perf_counter() - began

    def get(self) -> tuple[float, float, float]:
        """Seconds to get the batch, and to get it and read every value; and one of its values."""
        began = time.perf_counter()
        data = self._tq.kv_batch_get(self._keys, "bench")
        middle = time.perf_counter()
        for i in range(FIELDS):
            field = data[f"field_{i}"]
            (field.values() if field.is_nested else field).sum()
        ended = time.perf_counter()
        return middle - began, ended - began, float(data["field_0"][7][11])

    def value(self) -> float:
        """The value that `get` must return."""
        return float(self._batch["field_0"][7][11])

    def clear(self) -> None:
        """Make room for the next run."""
        self._tq.kv_clear(self._keys, "bench")

    def tiny(self) -> float:
        """Seconds for 1,024 rows of 16 bytes: put, a second field, list, get, clear."""
        tq, zeros = self._tq, self._torch.zeros(ROWS, 4)
        first, second = (self._of({name: zeros}, batch_size=[ROWS]) for name in ("a", "b"))
        began = time.perf_counter()
        tq.kv_batch_put(self._keys, "tiny", fields=first, tags=[{"status": "done"}] * ROWS)
        tq.kv_batch_put(self._keys, "tiny", fields=second)
        assert len(tq.kv_list("tiny")["tiny"]) == ROWS
        assert len(tq.kv_batch_get(self._keys, "tiny")["b"]) == ROWS
        tq.kv_clear(self._keys, "tiny")
        return time.perf_counter() - began

    def trajectories(self) -> tuple[float, float]:
        """Seconds to put 256 trajectories of 12 fields one by one, as in verl's rollout workers, and to get all."""
        tq, torch, keys = self._tq, self._torch, [f"t{i}" for i in range(256)]
        names = [f"field_{i}" for i in range(12)]
        rows = [
            self._of({name: torch.arange(200 + i)[None] for name in names}, batch_size=[1]) for i in range(len(keys))
        ]
        began = time.perf_counter()
        for key, fields in zip(keys, rows, strict=True):
            tq.kv_batch_put([key], "trajectories", fields=fields, tags=[{"status": "success"}])
        middle = time.perf_counter()
        tq.kv_batch_get(keys, "trajectories")
        ended = time.perf_counter()
        tq.kv_clear(keys, "trajectories")
        return middle - began, ended - middle

    def rollouts(self, awaited: bool) -> float:
        """Seconds to put 512 trajectories of text singly, of six small fields and a tag, list and read them. awaited:
        puts are awaited together, as in verl's agent loops, not one after another."""
        tq, torch, keys = self._tq, self._torch, [f"r{i}" for i in range(512)]
        rows = [
            {
                "prompts": torch.arange(100),
                "responses": torch.arange(200 + i % 100),
                "response_mask": torch.ones(200 + i % 100),
                "rm_scores": torch.zeros(200 + i % 100),
                "raw_prompt": [{"role": "user", "content": f"what is {i}?"}],
                "extra_fields": {"turns": i, "stop": "length"},
            }
            for i in range(len(keys))
        ]
        tag = {"status": "success", "prompt_len": 100, "global_steps": 1, "min_global_steps": None}

        async def put_all() -> None:
            pairs = zip(keys, rows, strict=True)
            await asyncio.gather(*(tq.async_kv_put(key, "rollouts", fields, tag) for key, fields in pairs))

        began = time.perf_counter()
        if awaited:
            asyncio.run(put_all())
        else:
            for key, fields in zip(keys, rows, strict=True):
                tq.kv_put(key, "rollouts", fields, tag)
        assert len(tq.kv_list("rollouts")["rollouts"]) == len(keys)
        data = tq.kv_batch_get(keys, "rollouts")
        sum(float(data[name].values().sum()) for name in ("responses", "response_mask", "rm_scores"))
        ended = time.perf_counter()
        tq.kv_clear(keys, "rollouts")
        return ended - began

    def one(self) -> tuple[float, float]:
        """Seconds to put one tiny row, and to get it: medians of 100."""
        tq, puts, gets = self._tq, [], []
        for _ in range(100):
            began = time.perf_counter()
            tq.kv_put("one", "one", fields={"x": self._torch.zeros(4)}, tag={"status": "done"})
            middle = time.perf_counter()
            tq.kv_batch_get("one", "one")
            puts.append(middle - began)
            gets.append(time.perf_counter() - middle)
            tq.kv_clear("one", "one")
        return float(np.median(puts)), float(np.median(gets))


def measure(get: Callable[[Any], Any], writers: dict[str, Any], readers: dict[str, Any]) -> list[Row]:
    """Measure all calls. get: a function that waits for an actor's result."""
    seconds: dict[str, dict[str, list[float]]] = {name: {} for name in MODULES}
    for writer in writers.values():
        get(writer.make.remote())
    for run in range(-1, RUNS):
        for name in MODULES:
            writer, reader, kept = writers[name], readers[name], seconds[name]
            put = get(writer.put.remote())
            got, read, value = get(reader.get.remote())
            assert value == get(writer.value.remote())
            get(writer.clear.remote())
            tiny = get(writer.tiny.remote())
            single = get(writer.one.remote())
            several = get(writer.trajectories.remote())
            rollouts = [get(writer.rollouts.remote(awaited)) for awaited in (True, False)]
            if run >= 0:  # the first warms up
                for what, took in zip(WHAT, (put, got, read, tiny, *single, *several, *rollouts), strict=True):
                    kept.setdefault(what, []).append(took)
    return [_row(what, bound, seconds) for what, bound in WHAT.items()]


#: The measurements, and the least ratio of their times to ours.
WHAT = {
    "put of 288 MiB": 5.0,
    "get of it": 20.0,
    "get of it, every value read": 5.0,
    "1,024 tiny rows: put, second field, list, get, clear": 2.0,
    "one tiny row: put": 1.0,
    "one tiny row: get": 1.0,
    "256 trajectories: put one by one": 1.0,
    "256 trajectories: got at once": 1.0,
    "512 trajectories of text, awaited together: put, list, get": 5.0,
    "512 trajectories of text, one after another: put, list, get": 2.0,
}


def _row(what: str, bound: float, seconds: dict[str, dict[str, list[float]]]) -> Row:
    ours, theirs = np.array(seconds["ours"][what]), np.array(seconds["theirs"][what])
    if "288" in what or "get of it" in what:
        unit = ROWS * FIELDS * WIDTH * 4 / 1e9
        detail = f"{unit / np.median(ours):.2f} and {unit / np.median(theirs):.2f} GB/s"
    elif "1,024" in what:
        detail = f"{ROWS / np.median(ours):,.0f} and {ROWS / np.median(theirs):,.0f} rows/s"
    else:
        detail = f"{np.median(ours) * 1e3:.2f} and {np.median(theirs) * 1e3:.2f} ms"
    return row(what, list(theirs / ours), at_least=bound, unit="x", detail=detail)


def main() -> int:
    """Measure, print, write JSON. Returns 1 if a promise is not kept, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.doors_transfer_queue", description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("bench/results/doors_transfer_queue.json"))
    chosen = parser.parse_args()
    import ray
    import transfer_queue

    import dataplane as dp
    from dataplane.integrations import ray as nodes

    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init("local", num_cpus=8, include_dashboard=False, object_store_memory=256 << 20, log_to_driver=False)
    try:
        nodes.up(dp.NodeConfig(memory="2GiB", spill=0))
        transfer_queue.init()
        stage = ray.remote(Stage).options(num_cpus=0)
        writers, readers = ({name: stage.remote(module) for name, module in MODULES.items()} for _ in range(2))
        rows = measure(ray.get, writers, readers)
        print(table(rows), flush=True)
        write_json(chosen.json, rows, {})
        print(f"written to {chosen.json}")
        transfer_queue.close()
        nodes.down()
    finally:
        ray.shutdown()
    return 0 if all(r.met for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
