"""A limit of 256 descriptors: views do not take any, and running out of them is not the node's end."""

from __future__ import annotations

import os
import resource
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from tests.processes import MIB, StandingNode, Worker, eventually, pattern

LIMIT = 256
VIEWS = 1000


def limited_reader(pipe: Any, address: str) -> None:
    import torch

    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    plane = dp.connect(address)
    refs = [plane.put({"x": pattern(seed, 32 << 10, 4).view(np.int64)}) for seed in range(VIEWS // 4)]
    views: list[Any] = []
    for ref in refs:
        batch = plane.get(ref)
        views += [batch["x"].numpy(), batch["x"].torch(), batch["x"].arrow(), plane.get(ref[1:3])["x"].torch()]
    for seed, view in enumerate(views[1::4]):
        view[0, 0] = -seed
    assert torch.equal(views[3], torch.from_numpy(pattern(0, 32 << 10, 4).view(np.int64)[1:3]))
    used = len(os.listdir("/proc/self/fd"))
    plane.close()
    right = all(np.array_equal(view, pattern(seed, 32 << 10, 4)) for seed, view in enumerate(views[::4]))
    pipe.send((len(views), used, right))
    pipe.recv()
    views.clear()
    batch = view = None
    pipe.send("dropped")
    pipe.recv()


@pytest.mark.long
def test_a_thousand_live_views_with_256_descriptors(tmp_path: Path) -> None:
    with (
        StandingNode(tmp_path, memory="32MiB") as node,
        Worker(limited_reader, node.address) as worker,
        dp.connect(node.address) as plane,
    ):
        views, used, right = worker.hear(60)
        assert views == VIEWS
        assert right
        assert used < 64
        assert plane.stats().pinned_bytes >= VIEWS // 4 * (32 << 10)
        worker.ask()
        eventually(lambda: plane.stats().pinned_bytes == 0, "all pins dropped")


def limited_node(pipe: Any, directory: Path) -> None:
    from dataplane.config import NodeConfig
    from dataplane.node.node import Node, run

    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
    node = Node(NodeConfig(memory="16MiB", spill="64MiB", spill_dir=directory, prewarm=0), directory / "s")
    run(node, ready=lambda: pipe.send(node.address))


def crowd_in(pid: int, path: Path) -> list[socket.socket]:
    """Connections, until the node has no descriptor left and a hundred more wait to be accepted."""
    crowd: list[socket.socket] = []

    def full() -> bool:
        with suppress(BlockingIOError):
            while True:
                connected = socket.socket(socket.AF_UNIX)
                crowd.append(connected)
                connected.setblocking(False)
                connected.connect(str(path))
        return len(os.listdir(f"/proc/{pid}/fd")) >= LIMIT

    eventually(full, "it has no more")
    return crowd


def test_a_node_out_of_descriptors_serves_those_it_has_and_recovers(tmp_path: Path) -> None:
    """Connections until it has none left: who is there goes on, spilling too; who comes later waits for one."""
    with Worker(limited_node, tmp_path) as node:
        address = node.hear()
        with dp.connect(address) as plane:
            refs = [plane.put({"x": pattern(seed, MIB)}) for seed in range(8)]
            crowd = crowd_in(node.pid, tmp_path / "s")
            try:
                for seed, ref in enumerate(refs):
                    assert np.array_equal(plane.get(ref)["x"].numpy(), pattern(seed, MIB))
            finally:
                for connected in crowd:
                    connected.close()
            with dp.connect(address) as later:
                assert later.get(refs[3])["x"].numpy()[0, 1] == pattern(3, 64)[0, 1]
            for seed in range(8, 24):
                refs.append(plane.put({"x": pattern(seed, MIB)}, timeout=60))
            assert np.array_equal(plane.get(refs[12])["x"].numpy(), pattern(12, MIB))
