"""A consumer that dies with pins, or is stopped past its lease, holds nobody else up."""

from __future__ import annotations

import asyncio
import pickle
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane.table import requests as t
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm
from tests.cases import each_case
from tests.chaos.raw import Raw
from tests.processes import MIB, StandingNode, Worker, eventually, own_memory, pattern


def consumer(pipe: Any, address: str) -> None:
    plane = dp.connect(address)
    batch = plane.get(pipe.recv())
    view = batch["x"].numpy()
    pipe.send(int(view.sum()))
    pipe.recv()


def test_a_killed_consumers_pins_drop_at_once(tmp_path: Path) -> None:
    with StandingNode(tmp_path, spill=0) as node, dp.connect(node.address) as plane:
        ref = plane.put({"x": pattern(1, 12 * MIB).view(np.int64)})
        with Worker(consumer, node.address) as worker:
            worker.ask(ref)
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


# A producer that dies at any step of a put leaves either nothing, or a shard that is whole and the node's.

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


# Clients that are answered more than they take, or ask for more than is kept: slowed down, in bounded memory.

NODE = {"memory": "64MiB", "spill": 0}


def flood(raw: Raw, count: int) -> None:
    """Requests that wait, and were sent with much: fifty thousand names."""
    names = [f"{number:06d}" for number in range(50_000)]
    for _ in range(count):
        raw.send(rm.AskTable(raw.next(), "nobody writes to it", b"", t.FindReady(columns=names), 600.0))


def test_the_requests_of_many_clients_that_wait_are_bounded_together(node: StandingNode) -> None:
    """Four clients whose requests would take a GiB; one that asks for little waits among them."""
    before = own_memory(node.pid)
    with ExitStack() as stack:
        greedy = [stack.enter_context(Raw(node.address)) for _ in range(4)]
        modest = stack.enter_context(Raw(node.address))
        for raw in greedy:
            flood(raw, 40)
        refused = {raw.hear().name for raw in greedy for _ in range(30)}
        assert refused == {"LimitExceeded"}
        modest.send(rm.AskTable(7, "a table", b"", t.FindReady(columns=["x"]), 600.0))
        assert isinstance(modest.ask(rm.AskTable(8, "a table", b"", t.Upsert(keys=["k"]))).result, t.RowNumbers)
        assert own_memory(node.pid) - before < 256 * MIB
        modest.send(m.Cancel(7))
        assert modest.hear().name == m.CANCELLED


async def test_large_requests_and_large_answers_at_once_do_not_wait_for_each_other(node: StandingNode) -> None:
    """More than 1 MiB waits to be sent at either end: were both not to read meanwhile, neither would ever go on."""
    async with dp.aio.connect(node.address) as plane:
        many = dp.concat([await plane.put({"a": np.arange(4)}) for _ in range(1500)])
        calls = []
        for number in range(150):
            calls.append(plane.put({"x": np.zeros(60_000, np.uint8)}, timeout=60))
            if number % 5 == 0:
                calls.append(plane.get(many, timeout=60))
        async with asyncio.timeout(60):
            found = await asyncio.gather(*calls)
        assert [len(each) for each in found] == [60_000, 6000, *4 * [60_000]] * 30
