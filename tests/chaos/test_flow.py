"""Clients that are answered more than they take, or ask for more than is kept: slowed down, in bounded memory."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import dataplane as dp
from dataplane.stream import requests as r
from dataplane.table import requests as t
from dataplane.wire import messages as m
from tests.chaos.raw import Raw
from tests.chaos.test_hostile import own_memory
from tests.processes import MIB, StandingNode, eventually

CONSUMERS, ROWS = 64, 1 << 16


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StandingNode]:
    with StandingNode(tmp_path, memory="64MiB", spill=0) as node:
        yield node


@pytest.mark.long
def test_who_takes_no_answers_keeps_what_it_is_to_be_given_and_costs_little(node: StandingNode) -> None:
    """It takes them later: a process may be stopped for a while."""
    with Raw(node.address) as raw, dp.connect(node.address) as plane:
        tasks = [f"t{number}" for number in range(24)]
        stream = plane.stream("s", tasks=tasks)
        opened = raw.ask(m.Open(raw.next(), "s", None))
        waiting = {raw.next() for _ in range(len(tasks))}
        for number, task in zip(sorted(waiting), tasks, strict=True):
            raw.send(consume(number, opened.stream, task))
        figures = plane.stats
        eventually(lambda: figures().clients == 2, "both are there")
        columns, groups = {"x": np.zeros(ROWS, np.int8)}, [f"group-{row:06d}" for row in range(ROWS)]
        nobodys = plane.stream("nobody's", tasks=tasks)
        before = own_memory(node.pid)
        nobodys.append(columns, group=groups)
        between = own_memory(node.pid)
        stream.append(columns, group=groups)
        assert plane.get(plane.put({"x": [1]}))["x"].to_list() == [1], "others go on"
        assert own_memory(node.pid) - between < between - before + 48 * MIB
        heard = [raw.hear() for _ in range(len(tasks))]
        assert {each.id for each in heard} == waiting
        assert all(isinstance(each.result, r.Delivered) and len(each.result.versions) == ROWS for each in heard)


def consume(number: int, stream: bytes, task: str) -> m.AskStream:
    return m.AskStream(number, stream, r.Consume(task=task, rows=ROWS, min_rows=ROWS, columns=("x",)), 60.0)


def flood(raw: Raw, count: int) -> None:
    """Requests that wait, and were sent with much: fifty thousand names."""
    names = [f"{number:06d}" for number in range(50_000)]
    for _ in range(count):
        raw.send(m.AskTable(raw.next(), "nobody writes to it", b"", t.Ready(columns=names), 600.0))


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
        modest.send(m.AskTable(7, "a table", b"", t.Ready(columns=["x"]), 600.0))
        assert isinstance(modest.ask(m.AskTable(8, "a table", b"", t.Upsert(keys=["k"]))).result, t.Numbered)
        assert own_memory(node.pid) - before < 256 * MIB
        modest.send(m.Cancel(7))
        assert modest.hear().name == m.CANCELLED


@pytest.mark.long
def test_half_messages_are_bounded_together_and_leave_nothing_behind(node: StandingNode) -> None:
    """Sixty connections with all but a byte of the largest message: 240 MiB, of which the node keeps what it may, and
    nothing once they have gone."""
    before, half = own_memory(node.pid), struct.pack("<I", m.MAX_FRAME) + bytes(m.MAX_FRAME - 1)
    raws = [Raw(node.address) for _ in range(60)]
    try:
        for raw in raws:
            raw.socket.setblocking(False)
        left = {raw: memoryview(half) for raw in raws}
        for _ in range(400):  # until nobody's is taken any more
            for raw, rest in list(left.items()):
                try:
                    left[raw] = rest[raw.socket.send(rest[: 64 << 10]) :]
                except BlockingIOError:
                    continue
                if not left[raw]:
                    del left[raw]
        with dp.connect(node.address) as plane:
            assert plane.stats().clients >= 60
        assert own_memory(node.pid) - before < 128 * MIB
    finally:
        for raw in raws:
            raw.close()
    eventually(lambda: own_memory(node.pid) - before < 16 * MIB, "what they took is given back")


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
            await asyncio.gather(*calls)
