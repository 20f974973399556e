"""A limit of 256 descriptors: views do not take any, and running out of them is not the node's end."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from tests.processes import StandingNode, Worker, eventually, pattern

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
def test_a_thousand_live_views_need_fewer_than_256_descriptors(tmp_path: Path) -> None:
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
