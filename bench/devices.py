"""Collectives over gloo compared with torch's, reads into tensors, and, with a GPU, copies to and from it.

`python -m bench.devices`. Ranks are processes on one node of this machine, with one thread each. Both sides of a ratio
are measured alternately in the same processes, from one barrier to the next. torch's collectives receive into existing
tensors. Without a GPU, the rows that need one are named and not measured.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

import dataplane as dp
from bench.measure import Row, row, table, timed, write_json

MIB = 1 << 20
RUNS = 7
LARGE = 288 * MIB
TIMEOUT_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write JSON. Returns 1 if a promise is not kept, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("bench/results/devices.json"))
    options = parser.parse_args(arguments)
    rng = np.random.default_rng(0)
    with dp.connect(config=dp.NodeConfig(memory="1GiB", spill=0)) as plane:
        large = plane.put({"pixels": rng.integers(0, 255, (288, MIB), np.uint8)})
        rows = [np.arange(length) for length in rng.integers(1, 8192, 1024)]
        ragged = plane.put({"ids": rows})
        with _Ranks(4, plane.address) as ranks:
            found = [_broadcast(ranks, large), _scatter(ranks, ragged, rows)]
        with _Ranks(8, plane.address) as ranks:
            found += _reads(ranks, ragged)
        found += [_killed(plane.address, large), _out(plane, large)]
        found += _on_gpu(plane, large)
    print(table(found))
    write_json(options.json, found, {"load": os.getloadavg()})
    return 0 if all(each.met for each in found) else 1


def _broadcast(ranks: _Ranks, ref: dp.BatchRef) -> Row:
    measured = ranks.all("broadcast", [ref, None, None, None])
    rates = [LARGE / MIB / statistics.median(each) for each in zip(*measured, strict=True)]
    detail = f"{rates[0]:.0f} MiB/s, and torch {rates[1]:.0f}, into new memory {rates[2]:.0f}"
    ratios = [torchs / ours for ours, torchs, _ in measured]
    return row("gloo: broadcast of 288 MiB to 4 ranks / torch's", ratios, at_least=0.9, unit="x", detail=detail)


def _scatter(ranks: _Ranks, ref: dp.BatchRef, rows: list[Any]) -> Row:
    longest = max(map(len, rows))
    measured = ranks.all("scatter", [(ref, longest), *[(None, longest)] * 3])
    ours, torchs = ([each[i] for each in measured] for i in (0, 1))
    padded = longest * len(rows) * 8 / ref.nbytes
    detail = f"{statistics.median(ours) * 1e3:.1f} ms; padded rows are {padded:.2f} x the bytes"
    ratios = [b / a for a, b in zip(ours, torchs, strict=True)]
    return row("gloo: scatter of 1,024 ragged rows / torch's, padded", ratios, at_least=1, unit="x", detail=detail)


def _reads(ranks: _Ranks, ref: dp.BatchRef) -> list[Row]:
    same = sum(ranks.each("reads", [ref] * 8)) / ref.nbytes
    slices = [ref[96 * rank : 96 * rank + 352] for rank in range(8)]  # each overlaps those of other ranks
    read = sum(ranks.each("reads", slices)) / ref.nbytes
    detail = f"their rows are {sum(map(len, slices)) / len(ref):.2f} x the batch's"
    return [
        row("bytes that 8 ranks read for one batch / its bytes", [same], at_most=1, unit="x"),
        row("bytes that 8 ranks read for overlapping slices / all", [read], at_most=1, unit="x", detail=detail),
    ]


def _killed(address: str, ref: dp.BatchRef) -> Row:
    took, named = [], 0
    for _ in range(3):
        with _Ranks(4, address) as ranks:
            ranks.tell("killed", [ref, None, None, None])
            heard = [ranks.hear(rank) for rank in (0, 1, 3)]
            took.append(max(seconds for seconds, _ in heard))
            named += sum(kind == "PeerUnavailable" for _, kind in heard)
    detail = f"timeout {TIMEOUT_S:g} s; {named} of {3 * len(took)} raised PeerUnavailable"
    return row(
        "a rank killed in the middle: until all others raise", took, at_most=TIMEOUT_S + 1, unit="s", detail=detail
    )


def _out(plane: dp.Plane, ref: dp.BatchRef) -> Row:
    import torch

    target = torch.zeros((288, MIB), dtype=torch.uint8)
    source = plane.get(ref)["pixels"].torch()
    ratios, rates = [], []
    for _ in range(RUNS):
        copied = timed(lambda: target.copy_(source))
        ours = timed(lambda: plane.get(ref, out={"pixels": target}))
        ratios.append(copied / ours)
        rates.append(LARGE / ours / 2**30)
    detail = f"{statistics.median(rates):.1f} GiB/s"
    return row("get(out=a host tensor) / a plain copy", ratios, at_least=0.9, unit="x", detail=detail)


ON_GPU = (
    "arena to device / pinned memory to device",
    "device to arena / device to pinned memory",
    "get of 2 GiB that another process keeps on the device",
    "loader with a device: waits / the same without copies",
)
"""The rows that need a GPU."""


def _on_gpu(plane: dp.Plane, ref: dp.BatchRef) -> list[Row]:
    import torch

    if not torch.cuda.is_available():
        for name in ON_GPU:
            print(f"not measured, since there is no GPU here: {name}")
        return []
    return [_to_device(plane, ref), _from_device(plane, ref), _kept(plane.address), _loaded(plane)]


def _done(work: Callable[[], Any]) -> float:
    """Seconds until the device has finished this work."""
    import torch

    def waited() -> None:
        work()
        torch.cuda.synchronize()

    return timed(waited)


def _to_device(plane: dp.Plane, ref: dp.BatchRef) -> Row:
    import torch

    pinned = plane.get(ref)["pixels"].torch().pin_memory()
    target = torch.empty(pinned.shape, dtype=torch.uint8, device="cuda")
    ratios = []
    for _ in range(RUNS + 1):
        plain = _done(lambda: target.copy_(pinned, non_blocking=True))
        ratios.append(plain / _done(lambda: plane.get(ref, out={"pixels": target})))
    return row(ON_GPU[0], ratios[1:], at_least=0.9, unit="x", detail=torch.cuda.get_device_name())


def _from_device(plane: dp.Plane, ref: dp.BatchRef) -> Row:
    import torch

    source = plane.get(ref, device="cuda")["pixels"].torch()
    pinned = torch.empty(source.shape, dtype=torch.uint8, pin_memory=True)
    ratios = []
    for _ in range(RUNS + 1):
        plain = _done(lambda: pinned.copy_(source, non_blocking=True))
        put: list[dp.BatchRef] = []
        ratios.append(plain / timed(lambda put=put: put.append(plane.put({"pixels": source}))))  # type: ignore[misc]
        plane.free(put[0])
    return row(ON_GPU[1], ratios[1:], at_least=0.85, unit="x", detail=torch.cuda.get_device_name())


def _kept(address: str) -> Row:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_keep, args=(theirs, address), daemon=True)
    process.start()
    try:
        with dp.connect(address) as plane:
            refs = ours.recv()
            plane.get(refs[0], device="cuda")  # the driver's first call is slow
            took = [timed(lambda ref=ref: plane.get(ref, device="cuda")) for ref in refs[1:]]  # type: ignore[misc]
        ours.send(None)
        process.join(60)
    finally:
        process.kill()
    return row(ON_GPU[2], [each * 1e3 for each in took], at_most=2, unit="ms", detail="CUDA IPC")


def _keep(pipe: Connection, address: str) -> None:
    import torch

    with dp.connect(address, gpu_budget="16GiB") as plane:
        refs = [
            plane.put({"x": torch.zeros((1, 2 << 30), dtype=torch.uint8, device="cuda")}, device="keep")
            for _ in range(4)
        ]
        pipe.send(refs)
        pipe.recv()
        for ref in refs:
            plane.free(ref)


def _loaded(plane: dp.Plane) -> Row:
    ratios = []
    for run in range(RUNS):
        waited = []
        for device in (None, "cuda"):
            stream = plane.stream(f"loaded-{run}-{device}", tasks=["actor"])
            for _ in range(16):
                stream.append({"x": np.zeros((16, MIB), np.uint8)})
            stream.close()
            waited.append(_waited(stream, device))
        ratios.append(waited[1] / waited[0])
    return row(ON_GPU[3], ratios, at_most=1.05, unit="x", detail="16 batches of 16 MiB, steps of 20 ms")


def _waited(stream: dp.Stream, device: str | None) -> float:
    """Seconds that a loop waits for batches, without its steps."""
    loader = dp.loader(stream, "actor", rows=16, columns=["x"], device=device, prefetch=2)
    batches, total = iter(loader), 0.0
    while True:
        began = time.perf_counter()
        if next(batches, None) is None:
            return total
        total += time.perf_counter() - began
        time.sleep(0.02)  # the step


class _Ranks:
    """The rank processes of a group, which measure on request. A context manager."""

    def __init__(self, size: int, address: str) -> None:
        context = get_context("spawn")
        self._directory = tempfile.TemporaryDirectory()
        self._ranks = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            store = f"{self._directory.name}/store"
            process = context.Process(target=_live, args=(theirs, rank, size, store, address), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((ours, process))

    def tell(self, what: str, arguments: Sequence[Any]) -> None:
        """Request the measurement `what` of all ranks, with an argument for each."""
        for (pipe, _), argument in zip(self._ranks, arguments, strict=True):
            pipe.send((what, argument))

    def hear(self, rank: int) -> Any:
        """The result of a rank, once it has one."""
        return self._ranks[rank][0].recv()

    def each(self, what: str, arguments: Sequence[Any]) -> list[Any]:
        """The results of all ranks."""
        self.tell(what, arguments)
        return [self.hear(rank) for rank in range(len(self._ranks))]

    def all(self, what: str, arguments: Sequence[Any]) -> Any:
        """The result of rank 0, of a measurement in which all ranks take part."""
        return self.each(what, arguments)[0]

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in self._ranks:
            pipe.close()
            process.join(10)
            process.kill()
            process.join()
        self._directory.cleanup()


def _live(pipe: Connection, rank: int, size: int, store: str, address: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    with dp.connect(address) as plane:
        while True:
            try:
                what, argument = pipe.recv()
            except EOFError:
                return
            pipe.send(_MEASURES[what](plane, argument))


def _timed(work: Callable[[], Any]) -> float:
    """Seconds from the start on all ranks until all have finished."""
    import torch.distributed as dist

    def together() -> None:
        work()
        dist.barrier()

    dist.barrier()
    return timed(together)


def _measure_broadcast(plane: dp.Plane, ref: dp.BatchRef | None) -> list[tuple[float, float, float]]:
    import torch
    import torch.distributed as dist

    tensor = torch.ones(LARGE, dtype=torch.uint8)
    ours = lambda: dp.collective.broadcast(ref, None, plane=plane)  # noqa: E731
    torchs = lambda: dist.broadcast(tensor, 0)  # noqa: E731
    new = lambda: dist.broadcast(tensor if dist.get_rank() == 0 else torch.empty_like(tensor), 0)  # noqa: E731
    for work in (ours, torchs):  # makes the connections
        _timed(work)
    return [(_timed(ours), _timed(torchs), _timed(new)) for _ in range(RUNS)]


def _measure_scatter(plane: dp.Plane, argument: tuple[dp.BatchRef | None, int]) -> list[tuple[float, float]]:
    import torch
    import torch.distributed as dist

    ref, longest = argument
    size = dist.get_world_size()
    refs = None if ref is None else ref.chunk(size)
    into = torch.zeros((1024 // size, longest), dtype=torch.int64)
    padded = None if ref is None else [torch.ones_like(into) for _ in range(size)]

    def ours() -> None:
        dp.collective.scatter(refs, None, plane=plane)["ids"].packed()

    def torchs() -> None:
        dist.scatter(into, padded, 0)

    for work in (ours, torchs):
        _timed(work)
    return [(_timed(ours), _timed(torchs)) for _ in range(RUNS)]


class _Counting:
    """A plane that counts the bytes of its gets."""

    def __init__(self, plane: dp.Plane) -> None:
        self._plane, self.address, self.nbytes = plane, plane.address, 0

    def get(self, ref: dp.BatchRef, *, timeout: float) -> dp.Batch:
        """Read a batch and count its bytes."""
        batch = self._plane.get(ref, timeout=timeout)
        self.nbytes += batch.nbytes
        return batch


def _measure_reads(plane: dp.Plane, ref: dp.BatchRef) -> int:
    counting = _Counting(plane)
    batch = dp.collective.get(ref, None, plane=counting)
    assert len(batch) == len(ref)
    return counting.nbytes


def _measure_killed(plane: dp.Plane, ref: dp.BatchRef | None) -> tuple[float, str]:
    import torch.distributed as dist

    dp.collective.broadcast(ref, None, plane=plane)
    if dist.get_rank() == 2:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
    began = 0.0
    try:
        while True:
            began = time.monotonic()
            dp.collective.broadcast(ref, None, plane=plane, timeout=TIMEOUT_S)
    except dp.DataplaneError as error:
        return time.monotonic() - began, type(error).__name__


_MEASURES: dict[str, Callable[[dp.Plane, Any], Any]] = {
    "broadcast": _measure_broadcast,
    "scatter": _measure_scatter,
    "reads": _measure_reads,
    "killed": _measure_killed,
}

if __name__ == "__main__":
    sys.exit(main())
