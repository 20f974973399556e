"""A consumer that dies with pins, or is stopped past its lease, holds nobody else up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from tests.cases import each_case
from tests.processes import MIB, StandingNode, Worker, pattern


def consumer(pipe: Any, address: str) -> None:
    plane = dp.connect(address)
    batch = plane.get(pipe.recv())
    view = batch["x"].torch() if pipe.recv() == "torch" else batch["x"].numpy()
    pipe.send(int(view.sum()))
    pipe.recv()


@each_case("kind", ["numpy", "torch"])
def test_a_killed_consumers_pins_drop_at_once(tmp_path: Path, kind: str) -> None:
    with StandingNode(tmp_path, spill=0) as node, dp.connect(node.address) as plane:
        ref = plane.put({"x": pattern(1, 12 * MIB).view(np.int64)})
        with Worker(consumer, node.address) as worker:
            worker.say(ref)
            worker.ask(kind)
            plane.free(ref)
            assert plane.stats().pinned_bytes == 12 * MIB
            with pytest.raises(dp.Backpressure):
                plane.put({"x": pattern(2, 12 * MIB)}, timeout=0.05)
            worker.kill()
        again = plane.put({"x": pattern(2, 12 * MIB)}, timeout=60)
        assert plane.stats().pinned_bytes == 0
        assert np.array_equal(plane.get(again)["x"].numpy(), pattern(2, 12 * MIB))


def stopped_producer(pipe: Any, address: str) -> None:
    plane = dp.connect(address)
    draft = plane.draft({"x": dp.dense((1, MIB), "uint64")})
    column = draft["x"]
    column[:] = 1
    pipe.send("written")
    pipe.recv()
    column[:] = 0xDEAD  # it does not know that the memory is no longer its own
    try:
        draft.seal()
    except dp.LeaseExpired as error:
        pipe.send(error.lease_s)
    else:
        pipe.send("sealed")
    pipe.recv()
    ref = plane.put({"x": pattern(5, MIB)})
    pipe.send(ref)
    pipe.recv()


def test_a_process_stopped_past_its_lease_is_refused(tmp_path: Path) -> None:
    with (
        StandingNode(tmp_path, spill=0, reservation_lease_s=0.5) as node,
        dp.connect(node.address) as plane,
        Worker(stopped_producer, node.address) as worker,
    ):
        worker.hear()
        assert plane.stats().reserved_bytes == 8 * MIB
        worker.freeze()
        # Others can use its memory, all of it, while it is stopped.
        ref = plane.put({"x": pattern(1, 15 * MIB)}, timeout=60)
        view = plane.get(ref)["x"].numpy()
        worker.thaw()
        assert worker.ask() == 0.5
        assert np.array_equal(view, pattern(1, 15 * MIB))
        assert plane.stats().reserved_bytes == 0
        assert plane.stats().shards == 1
        # And it goes on as a client.
        assert np.array_equal(plane.get(worker.ask())["x"].numpy(), pattern(5, MIB))
