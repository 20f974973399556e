"""Streams whose producers fall silent and whose consumers die half-way: others go on, and what is late is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane.wire import messages as m
from tests.chaos.raw import Raw
from tests.processes import StandingNode, Worker, eventually

LEASE_S = 0.3


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StandingNode]:
    with StandingNode(tmp_path, spill=0, reservation_lease_s=LEASE_S) as node:
        yield node


def values(delivery: Any) -> list[int]:
    return [int(x) for x in delivery.get("x")["x"].to_list()]


def take(stream: Any, task: str = "a", rows: int = 100, timeout: float = 0, **how: Any) -> list[int]:
    with stream.consume(task, rows=rows, columns=["x"], timeout=timeout, **how) as delivery:
        return values(delivery)


# Who is silent


def stopped_producer(pipe: Any, address: str) -> None:
    """Is admitted, and stops before it writes what no message carries."""
    plane = dp.connect(address)
    stream = plane.stream("s")
    write = stream._inner._writer.write

    async def written(*args: Any) -> Any:
        pipe.send("admitted")
        pipe.recv()
        return await write(*args)

    stream._inner._writer.write = written
    try:
        stream.append({"x": [1, 2], "big": np.zeros((2, m.MAX_INLINE), np.uint8)})
    except dp.DataplaneError as error:
        pipe.send(type(error).__name__)
    else:
        pipe.send("appended")
    stream._inner._writer.write = write
    pipe.recv()
    stream.append({"x": [5, 6]})  # it goes on as a client
    pipe.send("appended")
    pipe.recv()


@pytest.mark.long
def test_a_stopped_producers_admission_goes_to_others_and_its_append_is_refused(node: StandingNode) -> None:
    with dp.connect(node.address) as plane, Worker(stopped_producer, node.address) as worker:
        stream = plane.stream("s", ["a"], max_rows=2)
        assert worker.hear() == "admitted"
        with pytest.raises(dp.Backpressure, match="max_rows"):
            stream.append({"x": [3, 4]}, timeout=0)
        worker.freeze()
        stream.append({"x": [3, 4]}, timeout=60)
        worker.thaw()
        assert worker.ask() == "LeaseExpired"
        assert stream.stats()["appended"] == 2
        assert take(stream) == [3, 4]
        eventually(lambda: plane.stats().shards == 0, "what it wrote for it is freed")
        assert worker.ask() == "appended"
        assert take(stream) == [5, 6]
        assert plane.stats().memory_used == 0


def token(stream: Any) -> bytes:
    return bytes(stream._inner._token)


def append(raw: Raw, stream: Any, ticket: int, ref: dp.BatchRef) -> m.Append:
    return m.Append(raw.next(), token(stream), ticket, "", ref.encode(), [], b"", [], bytes(8), {}, {})


@pytest.mark.long
def test_nobody_gives_back_what_another_was_admitted_with(node: StandingNode) -> None:
    with dp.connect(node.address) as plane, Raw(node.address) as raw, Raw(node.address) as thief:
        stream = plane.stream("s", ["a"], max_rows=1)
        reply = raw.ask(m.Admit(raw.next(), token(stream), 1, 8, 0, "", b"", 5.0))
        assert isinstance(reply, m.Admitted)
        thief.send(m.GiveBack(token(stream), reply.ticket))
        assert isinstance(thief.ask(m.Stats(thief.next())), m.Figures)
        with pytest.raises(dp.Backpressure):
            stream.append({"x": [1]}, timeout=0)
        ref = plane.put({"x": [9]})
        assert isinstance(raw.ask(append(raw, stream, reply.ticket, ref)), m.Appended)
        assert take(stream) == [9]


# Who dies half-way


def frozen_scorer(pipe: Any, address: str) -> None:
    """Holds a row, and brings a column for it when it is told to."""
    stream = dp.connect(address).stream("s")
    delivery = stream.consume("score", rows=1, columns=["x"], lease=LEASE_S)
    pipe.send("held")
    pipe.recv()
    try:
        stream.extend(delivery.ref, {"y": [111]})
    except dp.DataplaneError as error:
        pipe.send(type(error).__name__)
    else:
        pipe.send("extended")
    pipe.recv()


def test_what_a_process_stopped_past_its_lease_computed_does_not_count(node: StandingNode) -> None:
    with dp.connect(node.address) as plane, Worker(frozen_scorer, node.address) as worker:
        stream = plane.stream("s", ["score", "use"])
        stream.append({"x": [1]})
        assert worker.hear() == "held"
        worker.freeze()
        rightful = stream.consume("score", rows=1, columns=["x"], timeout=60)
        worker.thaw()
        assert worker.ask() == "LeaseExpired"
        stream.extend(rightful.ref, {"y": [222]})
        rightful.ack()
        with stream.consume("use", rows=1, columns=["y"], timeout=0) as delivery:
            assert delivery.get()["y"].to_list() == [222]
        eventually(lambda: plane.stats().shards == 0, "nothing of it is kept")
