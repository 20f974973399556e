"""Clients that are answered more than they take, or ask for more than is kept: slowed down, in bounded memory."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import numpy as np

import dataplane as dp
from dataplane.table import requests as t
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm
from tests.chaos.raw import Raw
from tests.processes import MIB, StandingNode, own_memory

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
