"""Single puts of trajectories through TransferQueue, with its own storage and with ours.
`python -m bench.doors_rows`.

512 trajectories of seven small fields and a tag each, like those of verl's agent loops for text, are put singly.
Another process lists them and gets all fields. Then the writer clears them. `one by one`: `kv_put` after `kv_put`. `at
once`: `async_kv_put` of all concurrently, as in the worker of an agent loop. A round does both with each backend, in
two Ray jobs. Compared are the seconds of puts, list and get, and the writer's processor time of the puts, which varies
less on a shared host.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.jobs import BACKENDS, Job, actors, serve, transfer_queue
from bench.measure import Row, row, table, write_json

TRAJECTORIES = 512
PARTITION = "bench"
WAYS = ("one by one", "at once")
STEPS = {
    "put, list and get": ("put", "get"),
    "put": ("put",),
    "list and get": ("get",),
    "put, the writer's processor time": ("processor",),
}


class _End:
    """The actor that writes or reads."""

    def __init__(self) -> None:
        import transfer_queue as tq

        tq.init()
        self._rows = [_trajectory(number) for number in range(TRAJECTORIES)]

    def put(self, way: str) -> tuple[float, float]:
        """Seconds of the puts, and seconds of this process's processor time."""
        import transfer_queue as tq

        async def at_once() -> None:
            puts = [tq.async_kv_put(f"k{n}", PARTITION, each, {"seq": n}) for n, each in enumerate(self._rows)]
            await asyncio.gather(*puts)

        began, before = time.perf_counter(), time.process_time()
        if way == "at once":
            asyncio.run(at_once())
        else:
            for number, each in enumerate(self._rows):
                tq.kv_put(f"k{number}", PARTITION, each, {"seq": number})
        return time.perf_counter() - began, time.process_time() - before

    def get(self) -> float:
        """Seconds of the list and the get. Checks one field of all rows."""
        import torch
        import transfer_queue as tq

        began = time.perf_counter()
        keys = list(tq.kv_list(PARTITION)[PARTITION])
        got = tq.kv_batch_get(keys, PARTITION)
        taken = time.perf_counter() - began
        assert len(keys) == TRAJECTORIES
        for key, ids in zip(keys, got["input_ids"].unbind(), strict=True):
            assert torch.equal(ids, self._rows[int(key[1:])]["input_ids"])
        return taken

    def clear(self) -> None:
        import transfer_queue as tq

        tq.kv_clear([f"k{number}" for number in range(TRAJECTORIES)], PARTITION)


def _trajectory(number: int) -> dict[str, Any]:
    import torch

    length = 64 + number % 64
    return {
        "prompts": torch.arange(64),
        "responses": torch.arange(length),
        "input_ids": torch.arange(64 + length) + number,
        "response_mask": torch.ones(length, dtype=torch.int64),
        "rm_scores": torch.full((length,), float(number)),
        "uid": f"uid_{number}",
        "extra_fields": {"min_global_steps": None, "turns": [1, number]},
    }


def _serve(backend: str) -> None:
    """Answer the rounds of a Ray job with this backend with their times. A request names the way of the puts."""
    with transfer_queue(backend, "512MiB", 128 << 20):
        import ray

        writer, reader = actors(_End)

        def measured(way: str) -> dict[str, float]:
            put, processor = ray.get(writer.put.remote(way))
            get = ray.get(reader.get.remote())
            ray.get(writer.clear.remote())
            return {"put": put, "get": get, "processor": processor}

        serve(measured)


def measure(rounds: int) -> tuple[list[Row], dict[str, Any]]:
    """The ratios of TransferQueue's times with its own storage to those with ours, and all times."""
    seen: dict[str, dict[str, list[dict[str, float]]]] = {way: {name: [] for name in BACKENDS} for way in WAYS}
    with ExitStack() as stack:
        jobs = {name: stack.enter_context(Job("bench.doors_rows", name)) for name in BACKENDS}
        for number in range(rounds + 1):
            for way in WAYS:
                for name, job in jobs.items():
                    times = job.round(way)
                    if number:  # the first warms both up
                        seen[way][name].append(times)
    rows = []
    for way, by_name in seen.items():
        pairs = list(zip(by_name["SimpleStorage"], by_name["Dataplane"], strict=True))
        for what, steps in STEPS.items():
            ratios = [sum(theirs[s] for s in steps) / sum(ours[s] for s in steps) for theirs, ours in pairs]
            medians = [statistics.median(sum(each[s] for s in steps) for each in by_name[name]) for name in BACKENDS]
            bound = 2 if len(steps) == 2 else 0
            detail = f"{medians[0] * 1e3:.0f} and {medians[1] * 1e3:.0f} ms"
            rows.append(row(f"rows {way}: {what}, times faster", ratios, at_least=bound, unit="x", detail=detail))
    return rows, seen


def main() -> int:
    """Measure, print, write JSON. Returns 1 if a promise is not kept, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.doors_rows", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="how often (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("bench/results/doors_rows.json"))
    parser.add_argument("--serve", choices=BACKENDS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        _serve(chosen.serve)
        return 0
    rows, seen = measure(chosen.rounds)
    print(table(rows), flush=True)
    write_json(chosen.json, rows, seen)
    return 0 if all(each.met for each in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
