"""Transfers between two nodes on this machine's loopback by ucx and by nixl, compared with loops of these libraries.

`python -m bench.transports`. Transports that are not installed are named and left out. A get of the plane and the
library's loop move the same bytes between two processes, alternately. The loop maps and registers its memory and
connects before it is timed, as a handwritten loop would.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import select
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import dataplane as dp
from bench import workload
from bench.measure import Row, finished, row, table, timed
from bench.namespaces import End, nodes, together

RUNS = 9
_ENDS: list[End] = [("", "127.0.0.1")] * 2
_INSTALLED = {"ucx": ("ucxx",), "nixl": ("nixl_cu13", "nixl_cu12")}


class Loop:
    """A loop of the library alone: this process repeatedly reads `size` bytes of another one."""

    def __init__(self, owner: Callable[[Connection, int], None], size: int) -> None:
        self.pipe, theirs = get_context("spawn").Pipe()
        self._process = get_context("spawn").Process(target=owner, args=(theirs, size))
        self._process.start()
        self.target = np.zeros(size, np.uint8)

    def read(self) -> None:
        """Read all bytes once into `target`."""
        raise NotImplementedError

    def close(self) -> None:
        """End the other process."""
        self.pipe.send(None)
        self._process.join(10)
        self._process.kill()


class _Worker:
    """A UCX worker, connected to one in another process."""

    def __init__(self, pipe: Connection) -> None:
        import ucxx._lib.libucxx as ucx
        from ucxx._lib.arr import Array

        self._array, self._tag = Array, ucx.UCXXTag(7)
        context = ucx.UCXContext(feature_flags=(ucx.Feature.TAG, ucx.Feature.WAKEUP))
        self._worker = ucx.UCXWorker(context)
        self._worker.init_blocking_progress_mode()
        pipe.send(self._worker.address.tobytes())
        address = ucx.UCXAddress.create_from_buffer(pipe.recv())
        self._endpoint = self._worker.create_endpoint_from_worker_address(address, True)
        self._poller = select.poll()
        self._poller.register(self._worker.epoll_file_descriptor, select.POLLIN)

    def send(self, what: Any) -> None:
        """Send an array. Returns when it was received."""
        self._end(self._endpoint.tag_send(self._array(what), self._tag))

    def receive(self, into: Any) -> None:
        """Receive an array into this one."""
        self._end(self._endpoint.tag_recv(self._array(into), self._tag))

    def _end(self, request: Any) -> None:
        while not request.completed:
            if not self._worker.progress_once() and not request.completed and self._worker.arm():
                self._poller.poll(1000)
        request.check_error()


def own_ucx(pipe: Connection, size: int) -> None:
    """The other process of a `UcxLoop`."""
    worker, source = _Worker(pipe), np.ones(size, np.uint8)
    while pipe.recv() is not None:
        worker.send(source)


class UcxLoop(Loop):
    """Reads by one tagged message each."""

    def __init__(self, size: int) -> None:
        super().__init__(own_ucx, size)
        self._worker = _Worker(self.pipe)

    def read(self) -> None:
        self.pipe.send(True)
        self._worker.receive(self.target)


def _agent() -> Any:
    for name in _INSTALLED["nixl"]:
        if importlib.util.find_spec(name):
            nixl = importlib.import_module(name)
    return nixl.nixl_agent(f"bench-{os.getpid()}", nixl.nixl_agent_config(enable_prog_thread=False))


def own_nixl(pipe: Connection, size: int) -> None:
    """The other process of a `NixlLoop`."""
    agent, source = _agent(), np.ones(size, np.uint8)
    registered = agent.register_memory([(source.ctypes.data, size, 0, "")], "DRAM")
    pipe.send((source.ctypes.data, agent.get_partial_agent_metadata(registered, True)))
    while not pipe.poll(50e-6):
        agent.get_new_notifs()


class NixlLoop(Loop):
    """Reads by one one-sided READ each."""

    def __init__(self, size: int) -> None:
        super().__init__(own_nixl, size)
        self._agent = _agent()
        there, metadata = self.pipe.recv()
        self._there = [(there, size, 0)]
        self._here = [(self.target.ctypes.data, size, 0)]
        self._owner = self._agent.add_remote_agent(metadata)
        self._registered = self._agent.register_memory([(*self._here[0], "")], "DRAM")

    def read(self) -> None:
        here, there = (self._agent.get_xfer_descs(where, "DRAM") for where in (self._here, self._there))
        transfer = self._agent.initialize_xfer("READ", here, there, self._owner)
        state = self._agent.transfer(transfer)
        while state == "PROC":
            state = self._agent.check_xfer_state(transfer)
        assert state == "DONE", "NIXL reads its own process's memory"
        transfer.release()


_LOOPS: dict[str, Callable[[int], Loop]] = {"ucx": UcxLoop, "nixl": NixlLoop}


def measure(transport: str) -> Row:
    """Measure gets over this transport, and the library's loop."""
    columns = workload.dense()
    size = workload.nbytes(columns)
    loop = _LOOPS[transport](size)
    rates, limits = [], []
    try:
        with (
            TemporaryDirectory() as scratch,
            nodes(_ENDS, Path(scratch), options=("--spill", "0", "--transports", transport)) as hosts,
            dp.connect(hosts[0].address) as ours,
            dp.connect(hosts[1].address) as theirs,
        ):
            together([ours, theirs])
            for _ in range(RUNS + 2):
                ref = ours.put(columns)
                began = time.perf_counter()
                batch = theirs.get(ref)
                rates.append(size / (time.perf_counter() - began))
                limits.append(size / timed(loop.read))  # while the nodes have nothing to do
                del batch
                theirs.free(ref)
    finally:
        loop.close()
    ratios = [rate / limit for rate, limit in zip(rates[2:], limits[2:], strict=True)]
    found = row(f"get of a remote 288 MiB batch by {transport}, over its own loop", ratios, at_least=0.8, unit="x")
    return replace(found, detail=f"{np.median(rates[2:]) / 1e9:.2f} and {np.median(limits[2:]) / 1e9:.2f} GB/s")


def main() -> int:
    """Measure, print, and write JSON. Returns 1 if a promise is not kept, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "transports.json")
    arguments = parser.parse_args()
    there = [name for name, packages in _INSTALLED.items() if any(map(importlib.util.find_spec, packages))]
    for name in _INSTALLED.keys() - set(there):
        print(f"not measured: {name}: pip install rollout-dataplane[{name}]")
    if not there:
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["DATAPLANE_SPILL_DIR"] = scratch
        rows = [measure(name) for name in there]
    print(table(rows))
    return finished(arguments.json, rows, {})


if __name__ == "__main__":
    sys.exit(main())
