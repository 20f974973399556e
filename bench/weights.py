"""Weights by version, measured: `python -m bench.weights [--size 2GiB] [--only publish get hosts delta reshard gloo]`.

`publish` and `get` run on this host. The others need hosts of network namespaces (root, `ip`, `iperf3`). The two sides
of a ratio are measured alternately in one run. Weights are in bfloat16, in tensors of 8 MiB, and sizes are theirs. With
`--rate`, `tc` limits the rate of each host. Then the links are the bound, and not the processors that all hosts share.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import dataplane as dp
from bench import namespaces
from bench.hosts import iperf
from bench.measure import Row, row, table, timed, write_json
from dataplane.config import parse_size
from dataplane.weights import Slice

RUNS = 5
_TENSOR = 4 << 20  # elements
_PORT = 29400
_READERS, _HOSTS = 8, 4


def tensors_of(size: int, seed: int = 0) -> dict[str, Any]:
    """Random bfloat16 tensors of 8 MiB, of `size` bytes together."""
    import torch

    made = torch.Generator().manual_seed(seed)
    count = max(1, size // (2 * _TENSOR))
    return {
        f"layers.{i}.weight": torch.randint(
            -(1 << 15), 1 << 15, (_TENSOR // 2048, 2048), generator=made, dtype=torch.int16
        ).view(torch.bfloat16)
        for i in range(count)
    }


def renewed(tensors: dict[str, Any]) -> None:
    """Change all elements, in place."""
    import torch

    for tensor in tensors.values():
        tensor.view(torch.int16).add_(1)


def updated(tensors: dict[str, Any], share: float, seed: int) -> None:
    """Change this share of the elements, at random places, in place, like an optimizer's step in bfloat16."""
    import torch

    made = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        bits = tensor.view(torch.int16).view(-1)
        at = torch.randint(0, len(bits), (int(share * len(bits)),), generator=made)
        bits[at] ^= 1


def rewritten(tensors: dict[str, Any], share: float) -> None:
    """Change this share of the elements in place: the first tensors as a whole."""
    import torch

    left = int(share * sum(tensor.numel() for tensor in tensors.values()))
    for tensor in tensors.values():
        flat = tensor.view(torch.int16).view(-1)[:left]
        flat.add_(1)
        left -= len(flat)


def _bits(tensor: Any) -> Any:
    import torch

    return tensor.view(torch.int16).numpy()


# one host


def publishing(size: int, runs: int) -> list[Row]:
    """Publishing a version in which all elements changed, compared with a copy into allocated memory."""
    import torch

    tensors = tensors_of(size)
    into = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    ratios, rates = [], []

    def copies() -> float:
        """The faster of a copy by torch's threads and one by a single thread."""

        def by(copy: Callable[[Any, Any], object]) -> float:
            return timed(lambda: [copy(into[name], tensor) for name, tensor in tensors.items()])

        return min(by(torch.Tensor.copy_), by(lambda to, of: np.copyto(_bits(to), _bits(of))))

    with dp.connect(config=dp.NodeConfig(memory=int(2.6 * size) + (64 << 20), spill=0)) as plane:
        weights = plane.weights("bench", keep=1)
        for version in range(1, runs + 3):
            renewed(tensors)
            copied, took = copies(), timed(lambda: weights.publish(version, tensors))  # noqa: B023
            if version > 2:  # the first two find cold pages
                ratios.append(copied / took)
                rates.append(size / took / 1e9)
        weights.drop()
    detail = f"{min(rates):.1f} to {max(rates):.1f} GB/s"
    return [row("publish, over a copy", ratios, at_least=0.8, unit="x", detail=detail)]


def reading(size: int, runs: int) -> list[Row]:
    """Eight processes on the publisher's host that each read all weights: times, and memory over one copy."""
    with dp.connect(config=dp.NodeConfig(memory=int(1.4 * size) + (64 << 20), spill=0)) as plane, ExitStack() as undo:
        plane.weights("bench", keep=1).publish(1, tensors_of(size))
        readers = [undo.enter_context(Process(_read, plane.address)) for _ in range(_READERS)]
        times, together, busy = [], [], []
        for _ in range(runs):
            times.append(max(reader.ask("get")[0] for reader in readers))
        for _ in range(runs):
            for reader in readers:
                reader.say("get")
            found = [reader.hear() for reader in readers]
            together.append(max(took for took, _ in found))
            busy.append(sum(used for _, used in found) / len(found))
        private = sum(reader.ask("memory") for reader in readers)
        used = plane.stats().memory_used
    over = (used + private) / size
    return [
        row("get by 8 processes: memory over one copy", [over], at_most=1.05, unit="x"),
        row("get by 8 processes, one after another: the slowest", [1e3 * t for t in times], at_most=5.0, unit="ms"),
        row("get by 8 processes, all at once: the slowest", [1e3 * t for t in together], unit="ms"),
        row("get by 8 processes, all at once: processor time of each", [1e3 * t for t in busy], unit="ms"),
    ]


class Process:
    """A process that runs `work(pipe, *arguments)`, and answers one request at a time."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "dataplane.client.sync"])  # else each process would import them
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=work, args=(theirs, *arguments), daemon=True)
        self._process.start()
        assert self._pipe.recv() == "ready"

    def say(self, what: Any) -> None:
        """Send a request, and return at once."""
        self._pipe.send(what)

    def hear(self) -> Any:
        """Wait for the answer to the last request."""
        return self._pipe.recv()

    def ask(self, what: Any) -> Any:
        """Send a request, and wait for its answer."""
        self.say(what)
        return self.hear()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(10)
        self._process.kill()


def _asked(pipe: Any) -> Iterator[Any]:
    pipe.send("ready")
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return


def _read(pipe: Any, address: str) -> None:
    with dp.connect(address) as plane:
        weights = plane.weights("bench")
        found: Any = None
        every: Any = None
        base = _warmed(plane)
        for what in _asked(pipe):
            if what == "get":
                found = every = None  # unmapping the last result is not part of a get
                began, busy = time.perf_counter(), time.process_time()
                found = weights.get()
                every = [found[name] for name in found]
                pipe.send((time.perf_counter() - began, time.process_time() - busy))
                total = sum(int(tensor.view(-1)[::1024].view(-1).float().isnan().sum()) for tensor in every)
                assert total >= 0
            elif what == "memory":
                pipe.send(max(0, _private() - base))
            else:
                began = time.perf_counter()
                found = weights.get(f">= {what}", timeout=300)
                pipe.send((time.time(), time.perf_counter() - began, plane.stats().fetched_bytes))


def _warmed(plane: dp.Plane) -> int:
    """The private memory of this process after a first get, which imports modules."""
    import torch

    weights = plane.weights(f"warm-{os.getpid()}")
    weights.publish(1, {"x": torch.zeros(1024, dtype=torch.bfloat16)})
    assert not weights.get()["x"].float().isnan().any()
    weights.drop()
    return _private()


def _private() -> int:
    """Bytes of this process's private memory."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


# hosts


@contextmanager
def hosts(count: int, size: int, rate: str) -> Iterator[tuple[list[namespaces.End], list[namespaces.Host], list[Any]]]:
    """`count` hosts on a switch, with their nodes, and a plane on each."""
    with (
        tempfile.TemporaryDirectory() as directory,
        namespaces.switch(count, rate) as ends,
        namespaces.nodes(ends, Path(directory), memory=str(int(2.4 * size) + (64 << 20))) as nodes,
        ExitStack() as undo,
    ):
        planes = [undo.enter_context(dp.connect(node.address)) for node in nodes]
        namespaces.together(planes)
        yield ends, nodes, planes


def spreading(size: int, runs: int, rate: str) -> list[Row]:
    """Reads by four hosts after a publication: the rate until the last has all, and the publisher's sent bytes."""
    tensors = tensors_of(size)
    each, together, sent = [], [], []
    with hosts(1 + _HOSTS, size, rate) as (ends, nodes, planes), ExitStack() as undo:
        weights = planes[0].weights("bench", keep=1)
        readers = [undo.enter_context(Process(_read, node.address)) for node in nodes[1:]]
        for version in range(1, runs + 2):
            renewed(tensors)
            single = iperf(ends[0], ends[1], streams=1)
            before = nodes[0].sent()
            weights.publish(version, tensors)
            began = time.time()
            for reader in readers:
                reader.say(version)
            took = max(reader.hear()[0] for reader in readers) - began
            if version > 1:
                each.append(size / took / single)
                together.append(_HOSTS * size / took / single)
                sent.append((nodes[0].sent() - before) / size)
    links = f"links of {rate}" if rate else "links without a limit, on the same processors"
    return [
        row("to 4 hosts: the rate of each, over iperf3 to one", each, at_least=0.8, unit="x", detail=links),
        row("to 4 hosts: all of them together, over iperf3 to one", together, at_least=0.8, unit="x", detail=links),
        row("to 4 hosts: bytes that the publisher sends", sent, at_most=2.2, unit="x"),
    ]


def changing(size: int, runs: int, rate: str) -> list[Row]:
    """A version with two percent of the elements changed: bytes sent, and time of publication and read by one host."""
    tensors = tensors_of(size)
    found: dict[str, tuple[list[float], list[float]]] = {"everywhere": ([], []), "in one run": ([], [])}
    with hosts(2, size, rate) as (_, nodes, planes), ExitStack() as undo:
        weights = planes[0].weights("bench", keep=1)
        reader = undo.enter_context(Process(_read, nodes[1].address))
        version = 0

        def version_of() -> tuple[float, int]:
            nonlocal version
            version += 1
            sent, began = nodes[0].sent(), time.time()
            weights.publish(version, tensors)
            ended, *_ = reader.ask(version)
            return ended - began, nodes[0].sent() - sent

        version_of()
        for run in range(runs):
            renewed(tensors)
            full, _ = version_of()
            for name, (shares, times) in found.items():
                if name == "everywhere":
                    updated(tensors, 0.02, run)
                else:
                    rewritten(tensors, 0.02)
                took, came = version_of()
                shares.append(100 * came / size)
                times.append(took / full)
    rows = []
    for name, (shares, times) in found.items():
        rows.append(row(f"2 % changed {name}: bytes on the wire", shares, at_most=3.5, unit="%"))
        rows.append(row(f"2 % changed {name}: time, over a full version", times, at_most=0.2, unit="x"))
    return rows


def resharding(size: int) -> list[Row]:
    """Four ranks publish a quarter of each tensor's rows; six read half of its rows and a third of its columns each."""
    tensors = tensors_of(size)
    ratios = []
    with hosts(2, size, "") as (_, _, planes):
        for rank in range(4):
            planes[0].weights("bench").publish(
                1, {name: _rows(t, rank, 4) for name, t in tensors.items()}, rank=rank, ranks=4
            )
        before = planes[1].stats().fetched_bytes
        held = []
        for rank in range(6):
            slices = {name: _part(tensor.shape, rank) for name, tensor in tensors.items()}
            held.append(planes[1].weights("bench").get(slices=slices))
            after = planes[1].stats().fetched_bytes
            ratios.append((after - before) / held[-1].nbytes)
            before = after
    return [row("resharding 4 to 2 x 3: bytes moved over needed, by rank", ratios, at_most=1.05, unit="x")]


def _rows(tensor: Any, rank: int, ranks: int) -> Slice:
    count = tensor.shape[0] // ranks
    return Slice(tensor[rank * count : (rank + 1) * count], tensor.shape, (rank * count, 0))


def _part(shape: Sequence[int], rank: int) -> tuple[slice, slice]:
    rows, columns = shape
    down, across = divmod(rank, 3)
    return slice(rows * down // 2, rows * (down + 1) // 2), slice(columns * across // 3, columns * (across + 1) // 3)


# others


def _broadcast(pipe: Any, end: str, address: str, rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    namespaces.enter(end)
    os.environ["GLOO_SOCKET_IFNAME"] = end
    tensors = list(tensors_of(size).values())
    for _ in _asked(pipe):
        if not dist.is_initialized():  # when all ranks have started
            where = f"tcp://{address}:{_PORT + 1}"
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=1 + _HOSTS)
        dist.barrier()
        began = time.perf_counter()
        for tensor in tensors:
            dist.broadcast(tensor.view(torch.int16).view(torch.uint8), 0)
        dist.barrier()
        pipe.send(time.perf_counter() - began)


def against_gloo(size: int, runs: int, rate: str) -> list[Row]:
    """Publication and reads by four hosts, compared with `torch.distributed.broadcast` to them."""
    tensors = tensors_of(size)
    ratios = []
    with hosts(1 + _HOSTS, size, rate) as (ends, nodes, planes), ExitStack() as undo:
        weights = planes[0].weights("bench", keep=1)
        readers = [undo.enter_context(Process(_read, node.address)) for node in nodes[1:]]
        ranks = [
            undo.enter_context(Process(_broadcast, name, ends[0][1], rank, size)) for rank, (name, _) in enumerate(ends)
        ]
        for version in range(1, runs + 2):
            renewed(tensors)
            for rank in ranks:
                rank.say("broadcast")
            theirs = max(rank.hear() for rank in ranks)
            began = time.time()
            weights.publish(version, tensors)
            for reader in readers:
                reader.say(version)
            ours = max(reader.hear()[0] for reader in readers) - began
            if version > 1:
                ratios.append(theirs / ours)
    return [row("against gloo's broadcast, to 4 hosts", ratios, at_least=1.0, unit="x", detail=rate)]


def main() -> int:
    """Measure, print, and write JSON to `--json`, if given. Returns 1 if a promise is not kept, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="2GiB")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--rate", default="", help="the most that a host sends, in the notation of tc: 2gbit")
    parser.add_argument("--only", nargs="*", default=["publish", "get", "hosts", "delta", "reshard", "gloo"])
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    size = parse_size(asked.size) // (2 * _TENSOR) * 2 * _TENSOR
    why = namespaces.why_not("iperf3")
    alone: dict[str, Callable[[], list[Row]]] = {
        "publish": lambda: publishing(size, asked.runs),
        "get": lambda: reading(size, asked.runs),
    }
    apart: dict[str, Callable[[], list[Row]]] = {
        "hosts": lambda: spreading(size, asked.runs, asked.rate),
        "delta": lambda: changing(size, asked.runs, asked.rate),
        "reshard": lambda: resharding(size),
        "gloo": lambda: against_gloo(size, asked.runs, asked.rate),
    }
    rows: list[Row] = []
    for name, measure in (alone | apart).items():
        if name in asked.only and name in apart and why:
            print(f"{name} is not measured: {why}")
        elif name in asked.only:
            rows += measure()
            print(table(rows[-4:] if name == "delta" else rows[-3:]), flush=True)
    print(f"\n{size >> 20} MiB, load {os.getloadavg()[0]:.1f}\n{table(rows)}")
    if asked.json:
        write_json(asked.json, rows, {"size": size, "rate": asked.rate})
    return 0 if all(each.met for each in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
