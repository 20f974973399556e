"""The cost of membership for a node, by the number of members, which are all registered in a real etcd.

`python -m bench.membership` prints the costs and writes JSON. They are processor time of this process and of etcd,
which a busy machine changes little. A node's share of a core adds up its lease renewals, its checks of the watch, its
searches for members to remove, and a change of a member every `_CHANGES_S` seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil

from bench.measure import Row, finished, row, table
from dataplane.cluster.membership import LEASE_S, EntrySeal, Member, Membership
from dataplane.cluster.server import program
from dataplane.coordinator.base import Unavailable
from dataplane.coordinator.etcd import TIMEOUT_S, EtcdCoordinator
from dataplane.wire import auth

RUNS, RENEWALS, CHANGES = 5, 200, 20
HOSTS = (16, 1024)
_CHANGES_S = 60.0
_RENEW_S, _PING_S, _LOOK_S = LEASE_S / 4, TIMEOUT_S, LEASE_S / 8
_RESULTS = Path(__file__).parent / "results"


async def _each_us(work: Callable[[], Awaitable[object]], count: int, etcd: psutil.Process) -> tuple[float, float]:
    """Microseconds of processor time a call, of this process and of etcd."""
    began, there = time.process_time(), sum(etcd.cpu_times()[:2])
    for _ in range(count):
        await work()
    spent, spent_there = time.process_time() - began, sum(etcd.cpu_times()[:2]) - there
    return spent / count * 1e6, spent_there / count * 1e6


async def costs(address: str, etcd: psutil.Process, hosts: int) -> dict[str, float]:
    """Microseconds of processor time of each operation of a node among `hosts` nodes, and of etcd."""
    name = f"bench{hosts}"
    key = auth.Key(*auth.new().split(b"\n")[1:3])
    others, client = EtcdCoordinator([address], name), EtcdCoordinator([address], name)

    seal = EntrySeal(key)

    def entry(number: int, life: int = 1) -> tuple[str, bytes]:
        """A member's name and the entry that it registers."""
        name = number.to_bytes(8, "big").hex()
        where = f"tcp://10.1.{number >> 8}.{number & 255}:7000"
        return name, seal.sealed(name, msgspec.json.encode(Member(life, where, name, {"tcp": where})))

    registered = dict(entry(number) for number in range(2, hosts + 1))
    left = iter(registered.items())

    async def register() -> None:
        for node, value in left:
            await others.register(node, value, 3600)

    await asyncio.gather(*(register() for _ in range(16)))
    me = Membership(client, (1).to_bytes(8, "big").hex(), Member(1, "tcp://10.0.0.1:7000"), key=key)
    running = asyncio.ensure_future(me.run())
    try:
        while len(me.members) < hosts or not me.coordination.answers:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        registration = await client.register("bench", b"", 3600)
        found: dict[str, float] = {}
        found["renewal"], found["etcd_renewal"] = await _each_us(registration.renew, RENEWALS, etcd)
        found["ping"], found["etcd_ping"] = await _each_us(lambda: client.read("ping"), RENEWALS, etcd)

        async def look() -> None:
            me._settle()

        found["look"], _ = await _each_us(look, RENEWALS, etcd)
        turn = 1

        async def change() -> None:
            """Restart a member: its new entry is decoded and replaces the old one."""
            nonlocal turn
            turn += 1
            changed = asyncio.Event()
            me._changed[:] = [changed.set]
            await others.register(*entry(2, turn), 3600)
            await changed.wait()

        with_change, _ = await _each_us(change, CHANGES, etcd)
        registering, _ = await _each_us(lambda: others.register("x", b"", 3600), CHANGES, etcd)
        found["change"] = max(0.0, with_change - registering / 2)
        return found
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await others.aclose()
        await client.aclose()


def share(found: dict[str, float]) -> float:
    """The share of a core that a node needs, in percent."""
    spent = (
        found["renewal"] / _RENEW_S + found["ping"] / _PING_S + found["look"] / _LOOK_S + found["change"] / _CHANGES_S
    )
    return spent / 1e6 * 100


def etcd_share(found: dict[str, float], hosts: int) -> float:
    """The share of a core that etcd's leader needs for `hosts` nodes, in percent."""
    return hosts * (found["etcd_renewal"] / _RENEW_S + found["etcd_ping"] / _PING_S) / 1e6 * 100


def measure(address: str, etcd: psutil.Process) -> tuple[list[Row], dict[str, Any]]:
    """The rows, and the costs from which they are computed."""
    asyncio.run(ready(address))
    runs = {hosts: [asyncio.run(costs(address, etcd, hosts)) for _ in range(RUNS)] for hosts in HOSTS}
    rows = []
    for hosts, found in runs.items():
        last = found[-1]
        detail = f"renewal {last['renewal']:.0f} us, change {last['change']:.0f} us;"
        detail += f" etcd's leader {etcd_share(last, hosts):.2g} % for all of them"
        shares = [share(each) for each in found]
        rows.append(
            row(f"membership among {hosts} nodes: of a core, a node", shares, at_most=1, unit="%", detail=detail)
        )
    return rows, {"costs_us": {str(hosts): found for hosts, found in runs.items()}}


@contextmanager
def server(directory: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Run an etcd server. Yields its HOST:PORT and its process."""
    with socket.create_server(("127.0.0.1", 0)) as client, socket.create_server(("127.0.0.1", 0)) as peer:
        ports = [each.getsockname()[1] for each in (client, peer)]
    mine, peers = (f"http://127.0.0.1:{port}" for port in ports)
    where = ["--listen-client-urls", mine, "--advertise-client-urls", mine, "--listen-peer-urls", peers]
    where += ["--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"]
    command = [program(), "--data-dir", str(directory / "etcd"), *where]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"127.0.0.1:{ports[0]}", psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


async def ready(address: str) -> None:
    """Wait until etcd answers."""
    client = EtcdCoordinator([address], "bench")
    while True:
        try:
            await client.read("ready")
            return await client.aclose()
        except Unavailable:
            await asyncio.sleep(0.1)


def main() -> int:
    """Measure, print, write JSON. Returns 1 if a promise is not kept, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.membership", description=__doc__)
    parser.add_argument("--json", type=Path, default=_RESULTS / "membership.json")
    chosen = parser.parse_args()
    logging.disable()  # members come and go
    with tempfile.TemporaryDirectory() as directory, server(Path(directory)) as (address, etcd):
        rows, extra = measure(address, etcd)
    print(table(rows))
    return finished(chosen.json, rows, json.loads(json.dumps(extra)))


if __name__ == "__main__":
    sys.exit(main())
