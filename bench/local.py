"""One host: the cost of put, get, connect and spill, compared with limits of the machine. `make bench`.

Each function measures promises that share their set-up, on a node of its own, and returns rows. They run one after
another.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import dataplane as dp
from bench import workload
from bench.measure import Row, finished, measured, row, timed

RUNS = 7
MIB = 1 << 20


def put_steady(scratch: Path) -> list[Row]:
    """A put of 288 MiB into memory that earlier ones used, and the same for ragged columns and text."""
    rows = []
    for name, columns, bound in (("dense", workload.dense(), 0.85), ("ragged + text", workload.ragged(), 0.5)):
        size = workload.nbytes(columns)
        limit = workload.WarmCopy(size)
        with dp.connect(config=dp.NodeConfig(memory="1GiB", spill_dir=scratch)) as plane:
            plane.free(plane.put(columns))
            ratios, rates = [], []
            for _ in range(RUNS):
                copy = limit.seconds(columns)
                began = time.perf_counter()
                ref = plane.put(columns)
                seconds = time.perf_counter() - began
                plane.free(ref)
                ratios.append(copy / seconds)
                rates.append(size / seconds / 1e9)
        detail = f"{size / MIB:.0f} MiB, {np.median(rates):.1f} GB/s"
        rows.append(row(f"put, {name}, against a copy", ratios, at_least=bound, unit="x", detail=detail))
    return rows


def put_first(scratch: Path) -> list[Row]:
    """The first put, half a second after connecting."""
    columns = workload.dense()
    limit = workload.WarmCopy(workload.nbytes(columns))
    ratios = []
    for _ in range(RUNS):
        with dp.connect(config=dp.NodeConfig(memory="1GiB", spill_dir=scratch)) as plane:
            time.sleep(0.5)  # part of the promise
            seconds = timed(lambda: plane.put(columns))  # called at once
            ratios.append(limit.seconds(columns) / seconds)
    return [row("first put, 0.5 s after connect", ratios, at_least=0.5, unit="x", detail="prewarmed")]


def _get_in_child(address: str, pipe: Any) -> None:
    import torch

    torch.zeros(1)
    with dp.connect(address) as plane:
        while (ref := pipe.recv()) is not None:
            began = time.perf_counter()
            batch = plane.get(ref)
            tensors = [batch[name].torch() for name in batch]
            seconds = time.perf_counter() - began
            pipe.send((seconds, float(tensors[0][0, 0])))
            del batch, tensors


def get_elsewhere(scratch: Path) -> list[Row]:
    """A get in another process, with a tensor of each of nine columns: of 288 MiB and of 3 MiB."""
    times: dict[str, list[float]] = {"large": [], "small": []}
    with dp.connect(config=dp.NodeConfig(memory="1GiB", spill_dir=scratch)) as plane:
        batches = {"large": workload.dense(), "small": workload.dense(11)}
        refs = {name: plane.put(columns) for name, columns in batches.items()}
        ours, theirs = mp.get_context("spawn").Pipe()
        child = mp.get_context("spawn").Process(target=_get_in_child, args=(plane.address, theirs))
        child.start()
        for i in range(3 * RUNS):
            for name, ref in refs.items():
                ours.send(ref)
                seconds, first = ours.recv()
                assert first == float(batches[name]["field_0"][0, 0])
                if i >= RUNS:
                    times[name].append(seconds * 1e3)
        ours.send(None)
        child.join()
    ratios = [large / small for large, small in zip(times["large"], times["small"], strict=True)]
    return [
        row("get of 288 MiB elsewhere, nine tensors", times["large"], at_most=0.7, unit="ms"),
        row("the same, over that of 3 MiB", ratios, at_most=2.0, unit="x"),
    ]


def tiny(scratch: Path) -> list[Row]:
    """One row of 1 KiB, put and got, synchronously."""
    columns = {"x": np.zeros((1, 256), np.float32)}
    puts, gets = [], []
    with dp.connect(config=dp.NodeConfig(memory="256MiB", prewarm=0, spill_dir=scratch)) as plane:
        for _ in range(RUNS):
            put_us, get_us = [], []
            for _ in range(300):
                began = time.perf_counter()
                ref = plane.put(columns)
                middle = time.perf_counter()
                plane.get(ref)["x"].numpy()
                ended = time.perf_counter()
                put_us.append((middle - began) * 1e6)
                get_us.append((ended - middle) * 1e6)
                plane.free(ref)
            puts.append(float(np.median(put_us)))
            gets.append(float(np.median(get_us)))
    return [
        row("put of a row of 1 KiB, p50", puts, at_most=120, unit="us"),
        row("get of it, p50", gets, at_most=100, unit="us"),
    ]


def _seconds_of(code: str) -> float:
    """Seconds that the code takes in a new interpreter, without the interpreter's start."""
    program = f"import time; t = time.perf_counter()\n{code}\nprint(time.perf_counter() - t, flush=True)"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env)
    return float(run.stdout.split()[0])


def many(scratch: Path) -> list[Row]:
    """Thousands of shards of one row: got one by one, got as one reference, and freed as one."""
    count, singles, together, freed = 3000, [], [], []
    columns = {"x": np.zeros((1, 256), np.float32)}
    with dp.connect(config=dp.NodeConfig(memory="256MiB", prewarm=0, spill_dir=scratch)) as plane:
        for _ in range(RUNS):
            refs = [plane.put(columns) for _ in range(count)]
            singles.append(count / timed(lambda refs=refs: [plane.get(ref) for ref in refs]))
            ref = dp.concat(refs)
            together.append(min(timed(lambda ref=ref: plane.get(ref)["x"].numpy()) for _ in range(3)) * 1e3)
            freed.append(count / timed(lambda ref=ref: plane.free(ref)))
    return [
        row("gets of one row", singles, at_least=6000, unit="/s"),
        row("get over 3,000 shards of a row", together, at_most=15, unit="ms"),
        row("shards freed, 3,000 at once", freed, at_least=20000, unit="/s"),
    ]


def starting(scratch: Path) -> list[Row]:
    """Import and connect, each in a new interpreter, from compiled sources, as pip installs them."""
    connect = f"import dataplane as dp; p = dp.connect(config=dp.NodeConfig(memory='1GiB', spill_dir={str(scratch)!r}))"
    connects = [_seconds_of(connect) for _ in range(RUNS + 1)][1:]  # the first may compile
    imports = [_seconds_of("import dataplane as dp; dp.Plane, dp.BatchRef, dp.Batch") for _ in range(RUNS)]
    arrow = float(np.median([_seconds_of("import pyarrow") for _ in range(RUNS)]))
    return [
        row("connect() with a node, import included", connects, at_most=0.7, unit="s"),
        row("import of dataplane, all public names", imports, at_most=max(0.3, 1.2 * arrow), unit="s"),
    ]


def repeated(scratch: Path) -> list[Row]:
    """64 images of 4.8 MB, 8 responses each: stored bytes over logical bytes, by `repeat` and by `dedupe`."""
    patches, width, images, times = 1024, 1176, 64, 8
    rows = []
    with dp.connect(config=dp.NodeConfig(memory="1GiB", spill_dir=scratch, prewarm=0)) as plane:
        source = np.random.default_rng(0)
        pixels = [source.standard_normal((patches, width), dtype=np.float32) for _ in range(images)]
        for name in ("repeat", "dedupe"):
            if name == "repeat":
                ref = plane.put({"pixel_values": pixels}).repeat(times)
            else:
                ref = plane.put({"pixel_values": [p for p in pixels for _ in range(times)]}, dedupe=["pixel_values"])
            logical = images * times * patches * width * 4
            stored = plane.stats().memory_used
            got = plane.get(ref)["pixel_values"].numpy()
            assert len(got) == images * times
            assert all(np.array_equal(got[i], pixels[i // times]) for i in range(0, len(got), 7))
            del got
            plane.free(ref)
            ratio = stored / logical * times
            rows.append(row(f"64 images x 8, {name}: stored / logical x 8", [ratio], at_most=1.02, unit="x"))
    return rows


def spill_write(scratch: Path) -> list[Row]:
    """The rate of spilling shards on an idle node, over that of a sequential O_DIRECT write."""
    ratios, rates = [], []
    shard = {"x": np.random.default_rng(0).integers(0, 255, 32 * MIB, dtype=np.uint8).reshape(32, -1)}
    config = dp.NodeConfig(
        memory="512MiB", spill="1GiB", spill_dir=scratch, prewarm=0, high_watermark=0.99, low_watermark=0.1
    )
    for _ in range(RUNS):
        limit = workload.direct_write(scratch)
        with dp.connect(config=config) as plane:
            for _ in range(15):
                plane.put(shard)
            began = time.perf_counter()
            plane.put(shard)  # passes the high watermark
            target = 448 * MIB
            while plane.stats().spilled_bytes < target:
                time.sleep(0.002)
            rate = plane.stats().spilled_bytes / (time.perf_counter() - began)
        ratios.append(rate / limit)
        rates.append(rate / 1e9)
    return [row("spill, against O_DIRECT", ratios, at_least=0.7, unit="x", detail=f"{np.median(rates):.2f} GB/s")]


def queue_twice_the_budget(scratch: Path) -> list[Row]:
    """A queue of 512 MiB in 256 MiB, read in order and freed: bytes read back over the least possible."""
    ratios = []
    for _ in range(5):
        with dp.connect(config=dp.NodeConfig(memory="256MiB", spill="2GiB", spill_dir=scratch, prewarm=0)) as plane:
            payload = np.arange(4 * MIB // 8, dtype=np.int64)
            refs = [plane.put({"x": (payload + i)[None]}) for i in range(128)]
            had_to = 512 * MIB - 256 * MIB
            for i, ref in enumerate(refs):
                got = plane.get(ref)["x"].numpy()
                assert got[0, 0] == i
                assert got[0, -1] == payload[-1] + i
                del got
                plane.free(ref)
            ratios.append(plane.stats().restored_bytes / had_to)
    return [row("queue of twice the budget: read back / had to", ratios, at_most=1.05, unit="x")]


def _consume(address: str, refs: Any, done: Any) -> None:
    with dp.connect(address) as plane:
        while (item := refs.get()) is not None:
            number, ref = item
            got = plane.get(ref)["x"].numpy()
            assert got.shape == (8, MIB // 8)
            assert (got == number).all()
            time.sleep(0.015)  # limits it to half a GB/s
            del got
            plane.free(ref)
            done.put(number)


def _shared_memory(pid: int) -> tuple[int, int]:
    """Private bytes of the process, and allocated bytes of the segments that it has open."""
    private = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(("Private_Dirty", "Private_Clean")):
            private += int(line.split()[1]) * 1024
    shared = {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "memfd:dataplane" in os.readlink(fd):
                stat = os.stat(fd)
                shared[stat.st_ino] = stat.st_blocks * 512
        except FileNotFoundError:
            continue
    return private, sum(shared.values())


@contextmanager
def _watching(pid: int) -> Iterator[Callable[[], float]]:
    """Yields a function that returns the peak of node and shared memory together, in bytes, sampled every 20 ms."""
    peak = [0.0]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            peak[0] = max(peak[0], float(sum(_shared_memory(pid))))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: peak[0]
    finally:
        stop.set()
        thread.join()


def flow(scratch: Path) -> list[Row]:
    """4 GiB from one producer through 256 MiB to one slow consumer: the peak of node and shared memory."""
    context = mp.get_context("spawn")
    with dp.connect(config=dp.NodeConfig(memory="256MiB", spill="1GiB", spill_dir=scratch)) as plane:
        refs, done = context.Queue(), context.Queue()
        child = context.Process(target=_consume, args=(plane.address, refs, done))
        child.start()
        with _watching(plane.stats().pid) as peak:
            for number in range(512):
                refs.put((number, plane.put({"x": np.full((8, MIB // 8), number, dtype=np.int64)})))
            refs.put(None)
            child.join()
        assert child.exitcode == 0
        assert sorted(done.get(timeout=5) for _ in range(512)) == list(range(512))
        stats = plane.stats()
        spilled, waits = stats.spilled_bytes, stats.waits
    over = (peak() - 256 * MIB) / MIB
    detail = f"spilled {spilled / MIB:.0f} MiB, waited {waits} times; all bytes verified"
    return [row("4 GiB through 256 MiB: peak over the budget", [over], at_most=100, unit="MiB", detail=detail)]


MEASUREMENTS = [
    put_steady,
    put_first,
    get_elsewhere,
    tiny,
    many,
    starting,
    repeated,
    spill_write,
    queue_twice_the_budget,
    flow,
]


def main() -> int:
    """Measure, print, write JSON. Returns 1 if a promise is not kept, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.local", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=[m.__name__ for m in MEASUREMENTS], help="measure only this")
    parser.add_argument("--spill-dir", type=Path, help="a directory on the disk to measure (default: /var/tmp)")
    parser.add_argument("--json", type=Path, default=Path("bench/results/local.json"))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=chosen.spill_dir or "/var/tmp") as scratch:
        asked = [m for m in MEASUREMENTS if chosen.only is None or m.__name__ in chosen.only]
        rows = measured(asked, Path(scratch))
    return finished(chosen.json, rows, {})


if __name__ == "__main__":
    sys.exit(main())
