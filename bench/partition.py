"""The load that the one leader of a stream can carry: processor time a row, of the leader and of all nodes.

Nodes run on loopback with etcd, and the stream has a follower. A process on each node but the leader's appends,
consumes and acks blocks of rows. The system reports the nodes' processor time. `python -m bench.partition`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path

import numpy as np
import psutil

import dataplane as dp
from bench.measure import finished, row, table
from bench.membership import ready, server
from bench.namespaces import together

NODES, BLOCKS = 4, (1, 8, 64, 512)
APPENDING_NODES, CLIENTS = 8, 16
"""Nodes beside the leader's, and the clients on each of them that append single rows."""
TRAVELS = 300
"""Rows of a run that are timed from append to delivery."""
ROWS = {1: 600, 8: 4_000, 64: 24_000, 512: 96_000}
"""Rows of a run, by rows of a block."""

_TASK = "actor"
_RESULTS = Path(__file__).parent / "results" / "partition.json"


@contextmanager
def nodes(count: int) -> Iterator[list[dp.Plane]]:
    """Planes of `count` nodes on loopback, once all nodes know each other."""
    with ExitStack() as undo:
        directory = Path(undo.enter_context(tempfile.TemporaryDirectory()))
        etcd, _ = undo.enter_context(server(directory))
        asyncio.run(ready(etcd))
        planes = []
        for number in range(count):
            command = [sys.executable, "-m", "dataplane.cli", "node", "--socket", str(directory / f"{number}.sock")]
            command += ["--listen", "tcp://127.0.0.1:0", "--join", f"etcd://{etcd}/bench", "--memory", "256MiB"]
            process = subprocess.Popen(
                [*command, "--spill", "0", "--prewarm", "0"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            undo.callback(process.wait)
            undo.callback(process.kill)
            assert process.stdout is not None, "it was asked for"
            process.stdout.readline()
            planes.append(undo.enter_context(dp.connect(f"unix://{directory}/{number}.sock")))
        together(planes)
        yield planes


def flow(
    planes: Sequence[dp.Plane], block: int, rows: int, clients: int = 1, *, consumed: bool = True
) -> dict[str, float]:
    """Append rows in blocks from a process on each node but the leader's, and consume them there if `consumed`. Returns
    costs and rates. clients: planes of each process that append, each one block at a time."""
    name = f"flow-{block}-{clients}-{time.monotonic_ns()}"
    stream = planes[0].stream(name, tasks=[_TASK])
    stream.append({"x": np.zeros(1, np.float32)})  # so that the stream has a leader and a follower
    with stream.consume(_TASK, rows=1, columns=["x"]) as delivery:
        assert len(delivery) == 1
    leader = next(at for at, plane in enumerate(planes) if any(name in key for key in plane.stats().leads))
    others = [plane for plane in planes if plane is not planes[leader]] or list(planes)
    blocks = rows // block // len(others)
    taken = blocks * block if consumed else 0
    working = [Worker("bench.partition", plane.address, name, block, blocks, clients, taken) for plane in others]
    for worker in working:
        worker.hear()
    pids = [plane.stats().pid for plane in planes]
    before = [spent_s(pid) for pid in pids], _asked(planes)
    began = time.perf_counter()
    for worker in working:
        worker.tell("go")
    told = [json.loads(worker.hear()) for worker in working]
    took = time.perf_counter() - began
    spent = [spent_s(pid) - then for pid, then in zip(pids, before[0], strict=True)]
    asked = _asked(planes) - before[1]
    stream.drop()
    for worker in working:
        worker.end()
    count = len(others) * blocks * block
    return {
        "leader_us_a_row": spent[leader] / count * 1e6,
        "nodes_us_a_row": sum(spent) / count * 1e6,
        "rows_s": count / took,
        "leader_full_rows_s": count / max(spent[leader], 1e-9),
        "requests_a_512": asked / (count / 512),
        "append_p50_ms": statistics.median(each["append_p50_ms"] for each in told),
        "append_p99_ms": max(each["append_p99_ms"] for each in told),
    }


def spent_s(pid: int) -> float:
    """Seconds of processor time of a process."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _asked(planes: Sequence[dp.Plane]) -> int:
    """The number of requests between nodes."""
    return sum(plane.stats().asked for plane in planes)


class Worker:
    """A process that runs `work` of a module with these arguments. Lines are exchanged by standard input and output.
    first: code that it runs before."""

    def __init__(self, module: str, *arguments: object, first: str = "") -> None:
        script = f"{first}; from {module} import work; work()".removeprefix("; ")
        command = [sys.executable, "-c", script, *map(str, arguments)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def hear(self) -> str:
        assert self._process.stdout is not None, "it was asked for"
        return self._process.stdout.readline().strip()

    def tell(self, what: str) -> None:
        assert self._process.stdin is not None, "it was asked for"
        print(what, file=self._process.stdin, flush=True)

    def end(self) -> None:
        self._process.communicate(timeout=20)


def work() -> None:
    """The main function of a worker's process."""
    address, name, *counts = sys.argv[1:]
    asyncio.run(_work(address, name, *map(int, counts)))


async def _work(address: str, name: str, block: int, blocks: int, clients: int, taken: int) -> None:
    async with AsyncExitStack() as planes:
        streams = []
        for _ in range(clients):
            plane = await planes.enter_async_context(dp.aio.connect(address))
            streams.append(await plane.stream(name))
        columns = {"x": np.zeros(block, np.float32)}
        took: list[float] = []
        left = iter(range(blocks))
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)

        async def produce(stream: dp.aio.AsyncStream) -> None:
            for _ in left:
                since = time.perf_counter()
                await stream.append(columns)
                took.append(time.perf_counter() - since)

        async def consume() -> None:
            rows = 0
            while rows < taken:
                async with streams[0].consume(_TASK, rows=min(512, taken - rows), columns=["x"]) as delivery:
                    rows += len(delivery)

        await asyncio.gather(consume(), *map(produce, streams))
        p50, p99 = np.percentile(took, [50, 99]) * 1e3
        print(json.dumps({"append_p50_ms": float(p50), "append_p99_ms": float(p99)}), flush=True)


def travel(planes: Sequence[dp.Plane], rows: int) -> list[float]:
    """Append `rows` rows, one at a time, on a node that neither leads nor follows the stream. Returns the milliseconds
    from each append to the delivery on another such node."""
    name = f"travel-{time.monotonic_ns()}"
    stream = planes[0].stream(name, tasks=[_TASK])
    stream.append({"x": np.zeros(1, np.float32)})  # so that the stream has a leader and a follower
    with stream.consume(_TASK, rows=1, columns=["x"]):
        pass
    parts = [[*of.leads, *of.follows] for of in (plane.stats() for plane in planes)]
    outside = [plane.address for plane, keys in zip(planes, parts, strict=True) if not any(name in key for key in keys)]
    took = asyncio.run(_travel(outside[0], outside[-1], name, rows))
    stream.drop()
    return took


async def _travel(appending: str, consuming: str, name: str, rows: int) -> list[float]:
    async with await dp.aio.connect(appending) as one, await dp.aio.connect(consuming) as other:
        source, sink = await one.stream(name), await other.stream(name)

        async def delivered() -> float:
            async with sink.consume(_TASK, rows=1, columns=["x"]):
                return time.perf_counter()

        took = []
        for _ in range(rows):
            waiting = asyncio.create_task(delivered())
            await asyncio.sleep(0.02)  # so that the request waits at the leader, as in a job
            since = time.perf_counter()
            await source.append({"x": np.zeros(1, np.float32)})
            took.append((await waiting - since) * 1e3)
        return took


def measure(count: int, runs: int) -> dict[int, dict[str, list[float]]]:
    """The results of `flow` in `runs` runs, by rows of a block. Key -1: of many clients that append single rows. Key 0:
    percentiles of `travel`."""
    found: dict[int, dict[str, list[float]]] = {}
    with nodes(count) as planes:
        for _ in range(runs):
            for block in BLOCKS:
                for what, value in flow(planes, block, ROWS[block]).items():
                    found.setdefault(block, {}).setdefault(what, []).append(value)
            took = travel(planes, TRAVELS)
            for what, share in (("travel_p50_ms", 50), ("travel_p99_ms", 99)):
                found.setdefault(0, {}).setdefault(what, []).append(float(np.percentile(took, share)))
    with nodes(APPENDING_NODES + 1) as planes:
        for _ in range(runs):
            for what, value in flow(planes, 1, 20 * ROWS[1], CLIENTS, consumed=False).items():
                found.setdefault(-1, {}).setdefault(what, []).append(value)
    return found


def main() -> int:
    """Measure, print, write JSON. Returns 1 if a promise is not kept, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.partition", description=__doc__)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--runs", type=int, default=5)
    chosen = parser.parse_args()
    found = measure(chosen.nodes, chosen.runs)
    rows = [
        row("processor time of all nodes a row, blocks of 512", found[512]["nodes_us_a_row"], at_most=15, unit="us"),
        row("requests between nodes for 512 rows, blocks of 512", found[512]["requests_a_512"], at_most=6, unit="each"),
        row(
            "rows/s that fill the leader's core, blocks of 512", found[512]["leader_full_rows_s"], at_least=5e5, unit=""
        ),
        row(
            f"rows/s that fill the leader's core, singly by {CLIENTS} clients on each of {APPENDING_NODES} nodes",
            found[-1]["leader_full_rows_s"],
            at_least=2e4,
            unit="",
        ),
        row("append of a row to its delivery over four nodes, p50", found[0]["travel_p50_ms"], at_most=3, unit="ms"),
        row("append of a row to its delivery over four nodes, p99", found[0]["travel_p99_ms"], at_most=10, unit="ms"),
    ]
    print(table(rows))
    return finished(_RESULTS, rows, {"nodes": chosen.nodes, "found": {str(each): what for each, what in found.items()}})


if __name__ == "__main__":
    sys.exit(main())
