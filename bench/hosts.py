"""Transfers between hosts of network namespaces: of two, compared with iperf3, and of seven on slow links; and streams
over several hosts (`bench.host_streams`).

`python -m bench.hosts [--only NAME]`. Exits with a message if it is not root, or `ip` or `tc` is missing. Without
`iperf3`, gets are compared with `bench.copier` only.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import dataplane as dp
from bench import host_streams, workload
from bench.copier import Copier
from bench.measure import Row, finished, row, table
from bench.namespaces import End, Host, inside, link, nodes, switch, together, why_not

RUNS = 5
_STREAMS = 4
_RATE = "200mbit"


def iperf(server: End, client: End, streams: int = _STREAMS) -> float:
    """Bytes a second that iperf3 sends to the client over so many connections."""
    listening = subprocess.Popen(
        [*inside(server[0]), "iperf3", "-s", "-1", "-B", server[1], "--forceflush"], stdout=subprocess.PIPE, text=True
    )
    assert listening.stdout is not None, "it was asked for"
    for line in listening.stdout:
        if "listening" in line:
            break
    command = ["iperf3", "-c", server[1], "-R", "-P", str(streams), "-t", "2", "-J"]
    found = subprocess.run([*inside(client[0]), *command], capture_output=True, check=True)
    listening.communicate(timeout=10)
    return float(json.loads(found.stdout)["end"]["sum_received"]["bits_per_second"]) / 8


def get(address: str, encoded: bytes) -> None:
    """Read a reference: the main function of a reader."""
    with dp.connect(address) as plane:
        plane.get(dp.BatchRef.decode(encoded))


def two(scratch: Path) -> list[Row]:
    """Reads by one host from another."""
    columns = workload.dense()
    size = workload.nbytes(columns)
    with link() as ends, nodes(ends, scratch) as hosts, ExitStack() as undo:
        ours, theirs = (undo.enter_context(dp.connect(host.address)) for host in hosts)
        together([ours, theirs])
        limits: dict[str, Callable[[], float]] = {}
        if shutil.which("iperf3"):
            limits["iperf3"] = lambda: iperf(ends[0], ends[1])
        limits["a plain copier"] = undo.enter_context(Copier(ends[0], ends[1], size, _STREAMS)).rate
        rates: list[float] = []
        found: dict[str, list[float]] = {name: [] for name in limits}
        for _ in range(RUNS + 1):
            for name, limit in limits.items():
                found[name].append(limit())
            ref = ours.put(columns)
            began = time.perf_counter()
            batch = theirs.get(ref)
            rates.append(size / (time.perf_counter() - began))
            del batch
            theirs.free(ref)
        rows = []
        for name, those in found.items():
            ratios = [rate / those[i] for i, rate in enumerate(rates)][1:]
            over = row(f"get of a remote 288 MiB batch, over {name}", ratios, at_least=0.9, unit="x")
            rows.append(replace(over, detail=f"{np.median(rates) / 1e9:.2f} and {np.median(those) / 1e9:.2f} GB/s"))
        rows.append(row("get of a remote 1 KiB row, p50", _tiny(ours, theirs), at_most=1.5, unit="ms"))
        rows.append(
            row("8 processes, one remote batch: bytes over the link", _shared(hosts, ours), at_most=1.02, unit="x")
        )
        rows.append(row("2 of 9 columns, rows 100 to 200", _part(hosts, ours, theirs), at_most=1.05, unit="x"))
        scattered = _scattered(hosts, ours, theirs)
        rows.append(row("2,000 of 32,768 rows of 1 KiB, apart", scattered, at_most=1.15, unit="x"))
    return rows


def _scattered(hosts: list[Host], ours: dp.Plane, theirs: dp.Plane) -> list[float]:
    found = []
    chosen = np.sort(np.random.default_rng(1).choice(1 << 15, 2000, replace=False))
    for i in range(RUNS):
        ref = ours.put({"x": np.full((1 << 15, 256), i, np.float32)})
        before = hosts[1].received()
        theirs.get(ref[chosen])
        found.append((hosts[1].received() - before) / (len(chosen) << 10))
        ours.free(ref)
    return found


def many(scratch: Path) -> list[Row]:
    """Six hosts that read one batch at the same time, over links that are slower than this machine."""
    sent, took = [], []
    with switch(7, _RATE) as ends, nodes(ends, scratch) as hosts, ExitStack() as undo:
        planes = [undo.enter_context(dp.connect(host.address)) for host in hosts]
        together(planes)
        for i in range(RUNS):
            columns = {"x": np.full((16, 1 << 19), i, np.float32)}
            size = workload.nbytes(columns)
            alone = planes[0].put(columns)
            began = time.perf_counter()
            planes[1].get(alone)
            one = time.perf_counter() - began
            planes[1].free(alone)
            ref = planes[0].put(columns)
            before = hosts[0].sent()
            began = time.perf_counter()
            with ThreadPoolExecutor(6) as pool:
                for each in [pool.submit(plane.get, ref) for plane in planes[1:]]:
                    each.result()
            took.append((time.perf_counter() - began) / one)
            sent.append((hosts[0].sent() - before) / size)
            for plane in planes:
                plane.free(ref)
    return [
        row("6 hosts want one batch: bytes its host sends, over its size", sent, at_most=3.2, unit="x"),
        row("6 hosts want one batch: time, over that of one", took, at_most=4.0, unit="x"),
    ]


def _tiny(ours: dp.Plane, theirs: dp.Plane) -> list[float]:
    found = []
    for _ in range(RUNS):
        waits = []
        for i in range(200):
            ref = ours.put({"x": np.full((1, 256), i, np.float32)})
            began = time.perf_counter()
            theirs.get(ref)
            waits.append((time.perf_counter() - began) * 1e3)
            ours.free(ref)
        found.append(float(np.median(waits)))
    return found


def _shared(hosts: list[Host], ours: dp.Plane) -> list[float]:
    found = []
    columns = workload.dense(256)
    script = "import sys; from bench.hosts import get; get(sys.argv[1], bytes.fromhex(sys.argv[2]))"
    for _ in range(RUNS):
        ref = ours.put(columns)
        before = hosts[1].received()
        command = [sys.executable, "-c", script, hosts[1].address, ref.encode().hex()]
        getting = [subprocess.Popen(command) for _ in range(8)]
        assert [process.wait() for process in getting] == [0] * 8, "each got it"
        found.append((hosts[1].received() - before) / workload.nbytes(columns))
        ours.free(ref)
    return found


def _part(hosts: list[Host], ours: dp.Plane, theirs: dp.Plane) -> list[float]:
    found = []
    columns = workload.dense()
    for _ in range(RUNS):
        ref = ours.put(columns)
        part = ref.select(*ref.columns[3:5])[100:200]
        before = hosts[1].received()
        theirs.get(part)
        found.append((hosts[1].received() - before) / part.nbytes)
        ours.free(ref)
    return found


SECTIONS: dict[str, Callable[[Path], list[Row]]] = {"two": two, "many": many, **host_streams.SECTIONS}


def main() -> int:
    """Measure, print, write JSON. Returns 1 if a promise is not kept, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", choices=SECTIONS, help="measure only this")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "hosts.json")
    arguments = parser.parse_args()
    if why := why_not("tc"):
        sys.exit(f"not measured: {why}")
    rows: list[Row] = []
    extra: dict[str, Any] = {}
    for name in arguments.only or SECTIONS:
        with tempfile.TemporaryDirectory() as scratch:
            measured = SECTIONS[name](Path(scratch))
        rows += measured
        print(table(measured), flush=True)
        extra |= host_streams.BREAKDOWN
    return finished(arguments.json, rows, extra)


if __name__ == "__main__":
    sys.exit(main())
