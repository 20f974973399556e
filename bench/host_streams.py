"""Streams over hosts of network namespaces: the cost of bookkeeping on four hosts compared with one, and the time until
all clients have an answer when a host is killed.

Run by `python -m bench.hosts`.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import dataplane as dp
from bench.measure import Row, row
from bench.namespaces import Host, nodes, switch, together
from bench.partition import Worker, spent_s

RUNS = 5
GROUP, BLOCK, BLOCKS = 8, 512, 60
_TASK = "actor"
_WORKERS = 4
_WATCHED_S = 8.0  # time that clients continue after a host was killed
_SMALL = ("--spill", "0", "--prewarm", "0")

BREAKDOWN: dict[str, Any] = {}
"""Details of the rows, for the JSON."""


def bookkeeping(scratch: Path) -> list[Row]:
    """Rows a second that four processes append, consume in groups and ack: on four hosts, over the same on one."""
    ratios, four_costs, one_costs = [], [], []
    for _ in range(RUNS):
        with switch(4) as ends, nodes(ends, scratch, memory="256MiB", options=_SMALL) as hosts:
            four = flow([host.address for host in hosts])
        with dp.connect(config=dp.NodeConfig(memory="256MiB", spill=0, prewarm=0)) as plane:
            one = flow([plane.address])
        ratios.append(four["rows_s"] / one["rows_s"])
        four_costs.append(four["node_us"] + four["client_us"])
        one_costs.append(one["node_us"] + one["client_us"])
        BREAKDOWN.setdefault("bookkeeping", []).append({"four": four, "one": one})
    cores = psutil.cpu_count()
    detail = f"{cores} cores for {_WORKERS + 4} processes; processor time a row: {np.median(four_costs):.1f} us,"
    detail += f" on one host {np.median(one_costs):.1f}"
    return [
        row(
            "4 hosts, rows/s of a stream with groups, over those of one", ratios, at_least=0.25, unit="x", detail=detail
        ),
    ]


def flow(addresses: list[str], workers: int = _WORKERS, blocks: int = BLOCKS, first: str = "") -> dict[str, Any]:
    """Run `workers` processes that each append `blocks` blocks and consume, over these nodes. Returns rates and costs.
    first: code that the processes run before."""
    with ExitStack() as undo:
        planes = [undo.enter_context(dp.connect(address)) for address in addresses]
        if len(planes) > 1:
            together(planes)
        pids = [plane.stats().pid for plane in planes]
        stream = planes[0].stream("flow", tasks=[_TASK])
        at = [addresses[number % len(addresses)] for number in range(workers)]
        working = [Worker("bench.host_streams", each, number, blocks, first=first) for number, each in enumerate(at)]
        for worker in working:
            worker.hear()
        before = [spent_s(pid) for pid in pids], _counted(planes)
        began = time.perf_counter()
        for worker in working:
            worker.tell("go")
        for worker in working:
            worker.hear()
        stream.close()
        told = [json.loads(worker.hear()) for worker in working]
        took = time.perf_counter() - began
        rows = workers * blocks * BLOCK
        spent = [spent_s(pid) - each for pid, each in zip(pids, before[0], strict=True)]
        messages = [now - then for now, then in zip(_counted(planes), before[1], strict=True)]
        delivered = stream.stats()["task"][_TASK]["delivered"]
        stream.drop()
        assert sum(each["rows"] for each in told) == rows, "each was given once"
        for worker in working:
            worker.end()
    return {
        "rows_s": rows / took,
        "seconds": took,
        "node_us": sum(spent) / rows * 1e6,
        "client_us": sum(each["cpu_s"] for each in told) / rows * 1e6,
        "cores_used": (sum(spent) + sum(each["cpu_s"] for each in told)) / took,
        "messages": messages,
        "delivered": delivered,
        "deliveries": sum(each["deliveries"] for each in told),
        "told": told,
    }


def _counted(planes: list[dp.Plane]) -> list[int]:
    """The number of requests that each node has sent and answered."""
    return [stats.asked + stats.answered for stats in (plane.stats() for plane in planes)]


def work() -> None:
    """The main function of a worker's process."""
    asyncio.run(_work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))


async def _work(address: str, number: int, blocks: int) -> None:
    async with dp.aio.connect(address) as plane:
        stream = await plane.stream("flow")
        columns = {"x": np.zeros(BLOCK, np.float32)}
        print("ready", flush=True)
        sys.stdin.readline()
        began = time.process_time()

        async def produce() -> float:
            waited = 0.0
            for block in range(blocks):
                first = (number * blocks + block) * (BLOCK // GROUP)
                groups = np.repeat(np.arange(first, first + BLOCK // GROUP), GROUP).tolist()
                since = time.perf_counter()
                await stream.append(columns, group=groups)
                waited += time.perf_counter() - since
            print("appended", flush=True)
            return waited

        async def consume() -> dict[str, Any]:
            found: dict[str, Any] = {"rows": 0, "deliveries": 0, "consume_s": 0.0, "ack_s": 0.0}
            while True:
                since = time.perf_counter()
                try:
                    delivery = await stream.consume(
                        _TASK, rows=BLOCK, min_rows=GROUP, columns=["x"], sampler=dp.CompleteGroups(GROUP)
                    )
                except dp.Closed:
                    return found
                given = time.perf_counter()
                await delivery.ack()
                found["rows"] += len(delivery)
                found["deliveries"] += 1
                found["consume_s"] += given - since
                found["ack_s"] += time.perf_counter() - given

        append_s, found = await asyncio.gather(produce(), consume())
        print(json.dumps(found | {"append_s": append_s, "cpu_s": time.process_time() - began}), flush=True)


# one is killed


def killed(scratch: Path) -> list[Row]:
    """A host is killed while clients on two others get, append, consume and ack: the time until the last call has a
    result or an error of the plane."""
    worst: list[float] = []
    calls: dict[str, list[float]] = {}
    for _ in range(RUNS):
        with switch(3) as ends, nodes(ends, scratch, memory="256MiB", options=_SMALL) as hosts:
            for what, seconds in _kill(hosts).items():
                calls.setdefault(what, []).append(seconds)
        worst.append(max(runs[-1] for runs in calls.values()))
    BREAKDOWN["killed"] = calls
    detail = ", ".join(f"{what} {np.median(runs):.2f}" for what, runs in calls.items())
    return [
        row("a host is killed: until the last client has data or an error", worst, at_most=5.0, unit="s", detail=detail)
    ]


def _kill(hosts: list[Host]) -> dict[str, float]:
    """The longest seconds of a call by kind, from the kill of the host, or from the call's start if that is later."""
    with ExitStack() as undo:
        planes = [undo.enter_context(dp.connect(host.address)) for host in hosts]
        together(planes)
        streams = [plane.stream("busy", tasks=[_TASK]) for plane in planes]
        refs = [planes[2].put({"x": np.full(1 << 18, i, np.float32)}) for i in range(100)]
        clients = [_Calls(plane, stream, refs) for plane, stream in zip(planes[:2], streams[:2], strict=True)]
        for client in clients:
            client.start()
        time.sleep(1.0)  # all clients make calls
        hosts[2].stop(signal.SIGKILL)
        at = time.monotonic()
        time.sleep(_WATCHED_S)  # the measured time
        for client in clients:
            client.stop()
        streams[0].close()  # ends the waits for rows
        for client in clients:
            client.join()
    found: dict[str, float] = {}
    for client in clients:
        for what, began, ended in client.calls:
            if ended > at:
                found[what] = max(found.get(what, 0.0), ended - max(at, began))
    return found


class _Calls:
    """A client on one host, with a thread for each kind of call. `join` raises an error that a client need not
    expect."""

    def __init__(self, plane: dp.Plane, stream: dp.Stream, refs: list[dp.BatchRef]) -> None:
        self.calls: list[tuple[str, float, float]] = []
        self.errors: list[BaseException] = []
        self._plane, self._stream, self._refs = plane, stream, refs
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(each,)) for each in (self._get, self._append, self._take)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        for error in self.errors:
            raise error

    def _run(self, work: Callable[[int], None]) -> None:
        number = 0
        try:
            while not self._over.is_set():
                number += 1
                work(number)
        except BaseException as error:
            self.errors.append(error)

    def _timed(self, what: str, call: Callable[[], Any]) -> Any:
        began = time.monotonic()
        try:
            return call()
        except (dp.Retryable, dp.OutcomeUnknown, dp.LeaseExpired, dp.Lost, dp.Closed):
            return None
        finally:
            self.calls.append((what, began, time.monotonic()))

    def _get(self, number: int) -> None:
        ref = self._refs[number % len(self._refs)]
        self._timed("get", lambda: self._plane.get(ref[:: 1 + number % 7], timeout=30))
        self._plane.free(ref[:0])
        self._over.wait(0.01)

    def _append(self, number: int) -> None:
        groups = [f"{id(self)}-{number}-{i // GROUP}" for i in range(64)]
        columns = {"x": np.zeros(64, np.float32)}
        self._timed("append", lambda: self._stream.append(columns, group=groups, timeout=30))
        self._over.wait(0.01)

    def _take(self, number: int) -> None:
        delivery = self._timed(
            "consume", lambda: self._stream.consume(_TASK, rows=64, columns=["x"], timeout=30).__enter__()
        )
        if delivery is not None:
            self._timed("ack", delivery.ack)


SECTIONS: dict[str, Callable[[Path], list[Row]]] = {
    "bookkeeping": bookkeeping,
    "killed": killed,
}
