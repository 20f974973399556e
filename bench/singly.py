"""Single rows, ours compared with TransferQueue and Ray: `python -m bench.singly`, if both are installed.

A row is 512 token ids in a list, 512 float32 and a float. With TransferQueue, rows are put one after another, with 32
puts in flight, and by eight processes. Then one process reads 64 at a time and acks or clears them. We use a stream,
TransferQueue its keys. With Ray, one actor puts rows by `ray.put`, and another gets each by `ray.get`.

All processes are Ray actors, ours too. Each system is a job of its own. Rounds alternate, and other jobs are idle.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.jobs import actors, by_turns, serve, transfer_queue
from bench.measure import Row, finished, row, table, timed

ROW = {"ids": [list(range(512))], "logp": np.zeros((1, 512), np.float32), "reward": np.array([0.5])}
PROCESSES, IN_FLIGHT, TOGETHER = 8, 32, 64
ROWS = 256
OURS, QUEUE, OBJECTS = "dataplane", "transferqueue", "ray"
_NAME = "singly"
_numbers = itertools.count()


class Ours:
    """A process with a plane."""

    def __init__(self, address: str) -> None:
        import dataplane as dp

        self._address = address
        self._plane = dp.connect(address)
        self._stream = self._plane.stream(_NAME, tasks=["t"])

    def one_by_one(self, rows: int) -> float:
        """Seconds of `rows` appends, one after another."""
        return timed(lambda: [self._stream.append(ROW) for _ in range(rows)])

    def in_flight(self, rows: int) -> float:
        """Seconds of `rows` appends, `IN_FLIGHT` at a time."""
        return asyncio.run(_in_flight(self._address, rows))

    def consume(self, rows: int) -> float:
        """Seconds to read and ack `rows` rows, `TOGETHER` at a time."""

        def work() -> None:
            for _ in range(rows // TOGETHER):
                with self._stream.consume("t", rows=TOGETHER, min_rows=TOGETHER, columns=list(ROW)) as delivery:
                    batch = delivery.get()
                    assert [len(batch[name].numpy()) for name in batch] == [TOGETHER] * len(ROW)

        return timed(work)

    def put(self, rows: int) -> tuple[float, list[Any]]:
        """Seconds of `rows` puts, and their references."""
        began = time.perf_counter()
        refs = [self._plane.put(ROW) for _ in range(rows)]
        return time.perf_counter() - began, refs

    def get(self, refs: list[Any]) -> float:
        """Seconds of a get of each reference."""

        def work() -> None:
            for ref in refs:
                batch = self._plane.get(ref)
                assert [len(batch[name].numpy()) for name in batch] == [1] * len(ROW)

        return timed(work)

    def free(self, refs: list[Any]) -> None:
        """Free the rows."""
        for ref in refs:
            self._plane.free(ref)


async def _in_flight(address: str, rows: int) -> float:
    """Seconds of appends in flight. Not a method: Ray runs actors with asynchronous methods in an event loop."""
    import dataplane as dp

    async with dp.aio.connect(address) as plane:
        stream = await plane.stream(_NAME)

        async def some() -> None:
            for _ in range(rows // IN_FLIGHT):
                await stream.append(ROW)

        began = time.perf_counter()
        await asyncio.gather(*(some() for _ in range(IN_FLIGHT)))
        return time.perf_counter() - began


class Queue:
    """A process that uses TransferQueue."""

    def __init__(self) -> None:
        import transfer_queue as tq

        tq.init()
        self._queue = tq

    def _rows(self, rows: int) -> list[tuple[str, str, dict[str, Any], dict[str, Any]]]:
        import torch

        made = []
        for _ in range(rows):
            values = {
                "ids": torch.tensor(ROW["ids"][0]),
                "logp": torch.from_numpy(ROW["logp"][0]),
                "reward": torch.tensor(ROW["reward"][0]),
            }
            made.append((f"{id(self)}-{next(_numbers)}", _NAME, values, {}))
        return made

    def one_by_one(self, rows: int) -> float:
        """Seconds of `rows` puts, one after another."""
        made = self._rows(rows)
        return timed(lambda: [self._queue.kv_put(*each) for each in made])

    def in_flight(self, rows: int) -> float:
        """Seconds of `rows` puts, `IN_FLIGHT` at a time."""
        left = iter(self._rows(rows))

        async def some() -> None:
            for each in left:
                await self._queue.async_kv_put(*each)

        async def all_of_them() -> None:
            await asyncio.gather(*(some() for _ in range(IN_FLIGHT)))

        return timed(lambda: asyncio.run(all_of_them()))

    def consume(self, rows: int) -> float:
        """Seconds to read and clear `rows` rows, `TOGETHER` at a time. The list of keys is not timed."""
        keys = list(self._queue.kv_list(_NAME)[_NAME])[:rows]

        def work() -> None:
            for first in range(0, rows, TOGETHER):
                some = keys[first : first + TOGETHER]
                got = self._queue.kv_batch_get(some, _NAME)
                assert [len(got[name]) for name in ROW] == [TOGETHER] * len(ROW)
                self._queue.kv_clear(some, _NAME)

        return timed(work)


class Objects:
    """A process that uses Ray's objects."""

    def put(self, rows: int) -> tuple[float, list[Any]]:
        """Seconds of `rows` puts, and their references."""
        import ray

        began = time.perf_counter()
        refs = [ray.put(ROW) for _ in range(rows)]
        return time.perf_counter() - began, refs

    def get(self, refs: list[Any]) -> float:
        """Seconds of a get of each reference."""
        import ray

        def work() -> None:
            for ref in refs:
                assert [len(values) for values in ray.get(ref).values()] == [1] * len(ROW)

        return timed(work)

    def free(self, refs: list[Any]) -> None:
        """Do nothing: Ray frees objects without references."""


def _flows(ends: Sequence[Any]) -> dict[str, float]:
    """Microseconds a row through a stream or a queue, by measurement. All rows are read in the end."""
    import ray

    first = ends[0]
    found = {
        "one by one": ray.get(first.one_by_one.remote(ROWS)),
        "32 under way": ray.get(first.in_flight.remote(ROWS)),
    }
    each = ROWS // PROCESSES
    found["by eight processes"] = timed(lambda: ray.get([end.one_by_one.remote(each) for end in ends]))
    found["read in 64s"] = ray.get(ends[-1].consume.remote(3 * ROWS)) / 3
    return {name: seconds / ROWS * 1e6 for name, seconds in found.items()}


def _passes(ends: Sequence[Any]) -> dict[str, float]:
    """Microseconds of a row that one process puts and another gets."""
    import ray

    put, refs = ray.get(ends[0].put.remote(ROWS))
    got = ray.get(ends[1].get.remote(refs))
    ray.get(ends[0].free.remote(refs))
    return {"put by one, got by another": (put + got) / ROWS * 1e6}


def _serve(system: str) -> None:
    """Answer the rounds of a job with this system."""
    if system == QUEUE:
        with transfer_queue("SimpleStorage", "512MiB", 128 << 20):
            ends = actors(Queue, PROCESSES)
            serve(lambda _: _flows(ends))
        return
    import ray

    ray.init("local", num_cpus=4, include_dashboard=False, object_store_memory=256 << 20, log_to_driver=False)
    try:
        if system == OBJECTS:
            ends = actors(Objects)
            serve(lambda _: _passes(ends))
            return
        import dataplane as dp

        with dp.connect(config=dp.NodeConfig(memory="512MiB", prewarm=0, spill=0)) as plane:
            ends = [ray.remote(num_cpus=0)(Ours).remote(plane.address) for _ in range(PROCESSES)]
            ray.get([end.__ray_ready__.remote() for end in ends])
            serve(lambda _: _flows(ends) | _passes(ends))
    finally:
        ray.shutdown()


def compared(found: dict[str, list[dict[str, float]]]) -> list[Row]:
    """The ratios of the others' times to ours."""
    rows = []
    for name in (QUEUE, OBJECTS):
        for what in found[name][0] if found[name] else ():
            pairs = [(theirs[what], ours[what]) for theirs, ours in zip(found[name], found[OURS], strict=True)]
            theirs, ours = (statistics.median(each) for each in zip(*pairs, strict=True))
            detail = f"{theirs:,.0f} and {ours:,.0f} us a row"
            title = f"a row {what}: {name}'s time over ours"
            rows.append(row(title, [a / b for a, b in pairs], at_least=1, unit="x", detail=detail))
    return rows


def main() -> int:
    """Measure, print, write JSON. Returns 1 if another system is faster, else 0."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m bench.singly", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="how often (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("bench/results/singly.json"))
    parser.add_argument("--serve", choices=(OURS, QUEUE, OBJECTS), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        _serve(chosen.serve)
        return 0
    found = by_turns("bench.singly", (OURS, QUEUE, OBJECTS), chosen.rounds)
    rows = compared(found)
    print(table(rows), flush=True)
    return finished(chosen.json, rows, found)


if __name__ == "__main__":
    sys.exit(main())
