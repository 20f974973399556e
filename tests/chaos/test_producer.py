"""A producer that dies at any step of a put leaves either nothing, or a shard that is whole and the node's."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from tests.cases import each_case
from tests.processes import MIB, StandingNode, Worker, eventually, pattern

SIZE = 4 * MIB


def producer(pipe: Any, address: str, step: str) -> None:
    """Goes through a put, and at `step` says so and waits to be killed."""

    def reached(now: str, what: Any = None) -> None:
        if now == step:
            pipe.send(what)
            pipe.recv()

    plane = dp.connect(address)
    draft = plane.draft({"x": dp.dense((1, SIZE // 8), "uint64")})
    reached("after reserve")
    draft["x"][0, : SIZE // 16] = 7
    reached("mid-write")
    draft["x"][:] = pattern(1, SIZE)
    reached("before seal")
    ref = draft.seal()
    reached("after seal", pickle.dumps(ref))


@each_case("step", ["after reserve", "mid-write", "before seal"])
def test_a_producer_killed_before_the_seal_leaves_nothing(tmp_path: Path, step: str) -> None:
    with StandingNode(tmp_path, spill=0) as node, dp.connect(node.address) as plane:
        with Worker(producer, node.address, step) as worker:
            worker.hear()
            assert plane.stats().reserved_bytes == SIZE
            worker.kill()
        eventually(lambda: plane.stats().memory_used == 0, "the reservation returned")
        stats = plane.stats()
        assert (stats.shards, stats.reserved_bytes, stats.clients) == (0, 0, 1)
        # All of the memory can be used, and nothing of what was half written shows.
        ref = plane.put({"x": pattern(2, 15 * MIB)}, timeout=60)
        assert np.array_equal(plane.get(ref)["x"].numpy(), pattern(2, 15 * MIB))


@pytest.mark.long
def test_a_producer_killed_after_the_seal_leaves_the_shard(tmp_path: Path) -> None:
    with StandingNode(tmp_path) as node, dp.connect(node.address) as plane:
        with Worker(producer, node.address, "after seal") as worker:
            ref = pickle.loads(worker.hear())
            worker.kill()
        eventually(lambda: plane.stats().clients == 1, "the node noticed")
        assert plane.stats().pinned_bytes == 0
        assert np.array_equal(plane.get(ref)["x"].numpy(), pattern(1, SIZE))
        plane.free(ref)
        eventually(lambda: plane.stats().memory_used == 0, "it was freed")
