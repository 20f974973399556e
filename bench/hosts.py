"""Hosts made of network namespaces: what crosses between the nodes of two, beside iperf3, and of seven, on slow links.

`python -m bench.hosts`. Needs to be root, and `ip` and `iperf3`; says so and ends where it may not or has not.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

import dataplane as dp
from bench import workload
from bench.measure import Row, row, table, write_json

RUNS = 5
_STREAMS = 4
_RATE = "200mbit"


class Host:
    """A namespace with one end of the link, and a node in it."""

    def __init__(self, name: str, ip: str, key: Path, join: str = "") -> None:
        self.name = name
        self.ip = ip
        command = [*_inside(name), sys.executable, "-m", "dataplane.cli", "node", "--memory", "2GiB", "--spill", "0"]
        command += ["--listen", f"tcp://{ip}:0", "--key", str(key), *(("--join", join) if join else ())]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None, "it was asked for"
        assert self.process.stderr is not None, "it was asked for"
        self.address = self.process.stdout.readline().strip().partition("=")[2]
        self.control = self.process.stderr.readline().split()[-1]

    def received(self) -> int:
        """Bytes that have come over the link."""
        return self._crossed("rx_bytes")

    def sent(self) -> int:
        """Bytes that have gone over the link."""
        return self._crossed("tx_bytes")

    def _crossed(self, what: str) -> int:
        path = f"/sys/class/net/{self.name}/statistics/{what}"
        return int(subprocess.run([*_inside(self.name), "cat", path], capture_output=True, check=True).stdout)

    def stop(self) -> None:
        """End the node."""
        self.process.terminate()
        self.process.communicate(timeout=10)


def _inside(name: str) -> list[str]:
    return ["ip", "netns", "exec", name]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def link() -> Iterator[list[tuple[str, str]]]:
    """Two namespaces, joined: their names, which are also those of the link's ends, and addresses."""
    ends = [(f"dp{os.getpid()}{side}"[-15:], f"10.77.0.{i}") for i, side in ((1, "a"), (2, "b"))]
    with ExitStack() as undo:
        for name, _ in ends:
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "del", name)
        (a, _), (b, _) = ends
        _ip("link", "add", a, "netns", a, "type", "veth", "peer", "name", b, "netns", b)
        for name, ip in ends:
            _ip("-n", name, "addr", "add", f"{ip}/24", "dev", name)
            _ip("-n", name, "link", "set", name, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield ends


@contextmanager
def switch(count: int) -> Iterator[list[tuple[str, str]]]:
    """So many namespaces on one switch, each of which sends no more than `_RATE`."""
    ends = [(f"dp{os.getpid()}{i}"[-15:], f"10.77.1.{i + 1}") for i in range(count)]
    bridge = f"dp{os.getpid()}s"[-15:]
    with ExitStack() as undo:
        for name in (bridge, *(name for name, _ in ends)):
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "del", name)
        _ip("-n", bridge, "link", "add", "switch", "type", "bridge")
        _ip("-n", bridge, "link", "set", "switch", "up")
        for i, (name, ip) in enumerate(ends):
            _ip("link", "add", name, "netns", name, "type", "veth", "peer", "name", f"port{i}", "netns", bridge)
            _ip("-n", bridge, "link", "set", f"port{i}", "master", "switch")
            _ip("-n", bridge, "link", "set", f"port{i}", "up")
            _ip("-n", name, "addr", "add", f"{ip}/24", "dev", name)
            _ip("-n", name, "link", "set", name, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            limit = [
                "tc",
                "qdisc",
                "add",
                "dev",
                name,
                "root",
                "tbf",
                "rate",
                _RATE,
                "burst",
                "64kb",
                "latency",
                "50ms",
            ]
            subprocess.run([*_inside(name), *limit], check=True, capture_output=True)
        yield ends


def iperf(server: tuple[str, str], client: tuple[str, str]) -> float:
    """Bytes a second that iperf3 moves to the client with as many streams as we use."""
    listening = subprocess.Popen(
        [*_inside(server[0]), "iperf3", "-s", "-1", "-B", server[1], "--forceflush"], stdout=subprocess.PIPE, text=True
    )
    assert listening.stdout is not None, "it was asked for"
    for line in listening.stdout:
        if "listening" in line:
            break
    command = ["iperf3", "-c", server[1], "-R", "-P", str(_STREAMS), "-t", "2", "-J"]
    found = subprocess.run([*_inside(client[0]), *command], capture_output=True, check=True)
    listening.communicate(timeout=10)
    return float(json.loads(found.stdout)["end"]["sum_received"]["bits_per_second"]) / 8


def get(address: str, encoded: bytes) -> None:
    """What one of several processes does."""
    with dp.connect(address) as plane:
        plane.get(dp.BatchRef.decode(encoded))


def measure(scratch: Path) -> list[Row]:
    """All rows."""
    key = scratch / "key"
    subprocess.run([sys.executable, "-m", "dataplane.cli", "keygen", str(key)], check=True, capture_output=True)
    columns = workload.dense()
    size = workload.nbytes(columns)
    with link() as ends, ExitStack() as undo:
        hosts = [Host(*ends[0], key)]
        undo.callback(hosts[0].stop)
        hosts.append(Host(*ends[1], key, f"static://{hosts[0].control.removeprefix('tcp://')}"))
        undo.callback(hosts[1].stop)
        ours, theirs = (undo.enter_context(dp.connect(host.address)) for host in hosts)
        while min(len(plane.members().get("members", ())) for plane in (ours, theirs)) < 2:
            time.sleep(0.05)
        rates, limits = [], []
        for _ in range(RUNS + 1):
            limit = iperf(ends[0], ends[1])
            ref = ours.put(columns)
            began = time.perf_counter()
            batch = theirs.get(ref)
            limits.append(limit)
            rates.append(size / (time.perf_counter() - began) / limit)
            del batch
            theirs.free(ref)
        rows = [row("get of a remote 288 MiB batch, over iperf3", rates[1:], at_least=0.85, unit="x")]
        rows[0] = replace(rows[0], detail=f"iperf3: {np.median(limits) / 1e9:.2f} GB/s")
        rows.append(row("get of a remote 1 KiB row, p50", _tiny(ours, theirs), at_most=1.5, unit="ms"))
        rows.append(
            row("8 processes, one remote batch: bytes over the link", _shared(hosts, ours), at_most=1.02, unit="x")
        )
        rows.append(row("2 of 9 columns, rows 100 to 200", _part(hosts, ours, theirs), at_most=1.05, unit="x"))
        scattered = _scattered(hosts, ours, theirs)
        rows.append(row("2,000 of 32,768 rows of 1 KiB, apart", scattered, at_most=1.15, unit="x"))
    return rows + _many(key)


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


def _many(key: Path) -> list[Row]:
    """Six hosts that want what one has, all at once, on links that are slower than this machine."""
    sent, took = [], []
    with switch(7) as ends, ExitStack() as undo:
        hosts: list[Host] = []
        for name, ip in ends:
            join = f"static://{hosts[0].control.removeprefix('tcp://')}" if hosts else ""
            hosts.append(Host(name, ip, key, join))
            undo.callback(hosts[-1].stop)
        planes = [undo.enter_context(dp.connect(host.address)) for host in hosts]
        while min(len(plane.members().get("members", ())) for plane in planes) < len(hosts):
            time.sleep(0.05)
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


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "hosts.json")
    arguments = parser.parse_args()
    missing = [tool for tool in ("ip", "iperf3") if shutil.which(tool) is None]
    if missing or os.geteuid():
        sys.exit(f"not measured: {'root is needed' if os.geteuid() else ' and '.join(missing) + ' must be installed'}")
    with tempfile.TemporaryDirectory() as scratch:
        rows = measure(Path(scratch))
    print(table(rows))
    write_json(arguments.json, rows, {})
    print(f"written to {arguments.json}")


if __name__ == "__main__":
    main()
