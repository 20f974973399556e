"""Appends and extends that carry their columns in one request: whoever waits, goes or lies leaves nothing."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm
from dataplane.wire import shard_messages as sm
from tests.cases import each_case
from tests.chaos.raw import Raw, one_column
from tests.processes import StandingNode, Worker, eventually

NODE = {"spill": 0, "memory": "8MiB"}


def take(stream: Any, rows: int = 100, columns: tuple[str, ...] = ("x",)) -> list[Any]:
    with stream.consume("a", rows=rows, columns=columns, timeout=60) as delivery:
        got = delivery.get()
        return [got[name].to_list() for name in columns]


PAGE = {"page": np.zeros((1, 4096), np.uint8)}
"""A column that needs a page of its own, whatever room others have left."""


def fill(plane: Any) -> list[dp.BatchRef]:
    """All of the node's memory, but for less than a page."""
    left = plane.stats().memory_budget - plane.stats().memory_used
    half = left // 2 // 4096 * 4096
    return [plane.put({"x": np.zeros(size, np.uint8)}) for size in (half, left - half)]


@pytest.mark.long
@pytest.mark.parametrize("of", ["stream", "memory"])
@pytest.mark.parametrize("how", ["timeout", "killed"])
def test_an_inline_append_of_a_departed_client_leaves_nothing(node: StandingNode, of: str, how: str) -> None:
    with dp.connect(node.address) as plane, Worker(waits, node.address, how) as worker:
        stream = plane.stream("s", ["a"], max_rows=2)
        stream.append({"x": [1, 2] if of == "stream" else [1]})
        full = fill(plane) if of == "memory" else []
        before = plane.stats()
        worker.say()
        if how == "timeout":
            assert worker.hear() == "Backpressure"
        else:
            eventually(
                lambda: stream.stats()["waiting"] == 1 if of == "stream" else plane.stats().waiting == 1, "it waits"
            )
            worker.kill()
        eventually(lambda: stream.stats()["waiting"] == plane.stats().waiting == 0, "it waits no more")
        assert (plane.stats().shards, plane.stats().memory_used) == (before.shards, before.memory_used)
        for ref in full:
            plane.free(ref)
        if of == "memory":
            stream.append({"x": [2], **PAGE}, timeout=60)  # its place is free
        assert take(stream) == [[1, 2]]


def waits(pipe: Any, address: str, how: str) -> None:
    pipe.recv()
    plane = dp.connect(address)
    try:
        plane.stream("s").append({"x": [9], **PAGE}, timeout=0.1 if how == "timeout" else 60)
    except dp.DataplaneError as error:
        pipe.send(type(error).__name__)


def int64s(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def token(stream: Any) -> bytes:
    said: bytes = stream._inner._token
    return said


def appending(raw: Raw, to: Any, /, nbytes: int = 64, timeout_s: float = 5.0, **how: Any) -> rm.AppendRows:
    columns = rm.Inline(bytes(nbytes), one_column(1, width=nbytes, rows=1), [nbytes])
    said: dict[str, Any] = {
        "id": raw.next(),
        "stream": token(to),
        "columns": columns,
        "keys": [],
        "digest": b"",
        "groups": [],
        "versions": int64s(0),
        "tags": {},
        "begin": None,
        "lengths": {},
        "timeout_s": timeout_s,
    }
    return rm.AppendRows(**(said | how))


ROW = one_column(64, rows=1, width=64)
FALSE = {
    "no versions": {"versions": b""},
    "versions of two rows": {"versions": int64s(0, 0)},
    "half a version": {"versions": b"abc"},
    "bytes of no column": {"columns": rm.Inline(bytes(64), ROW, [])},
    "bytes of two columns": {"columns": rm.Inline(bytes(64), ROW, [64, 64])},
    "fewer bytes than none": {"columns": rm.Inline(bytes(64), ROW, [-1])},
    "bytes beyond all memory": {"columns": rm.Inline(bytes(64), ROW, [1 << 62])},
    "no layout": {"columns": rm.Inline(bytes(64), b"nonsense", [64])},
    "a layout of other bytes": {"columns": rm.Inline(bytes(64), one_column(1, rows=1, width=5000), [64])},
    "no rows": {"columns": rm.Inline(b"", one_column(0, rows=0), [0])},
    "too many bytes": {"columns": rm.Inline(bytes(sm.MAX_INLINE + 1), ROW, [64])},
    "groups of two rows": {"groups": ["a", "b"]},
    "lengths of no column": {"lengths": {"z": int64s(1)}},
    "tags of no row": {"tags": {"t": []}},
    "no stream": {"stream": b"x" * 8},
    "a time before now": {"timeout_s": -1.0},
}


@each_case("false", FALSE)
def test_an_invalid_inline_append_is_refused_and_leaves_nothing(node: StandingNode, false: str) -> None:
    with dp.connect(node.address) as plane, Raw(node.address) as raw:
        stream = plane.stream("s", ["a"], max_rows=1)
        request = appending(raw, stream, **FALSE[false])
        raw.send(request)
        reply = raw.hear()
        while reply.id != request.id:
            reply = raw.hear()
        assert isinstance(reply, m.Failure)
        with Raw(node.address) as another:
            assert isinstance(another.ask(appending(another, stream)), rm.RowsAppended)  # the place is free
        assert plane.stats().shards == 1
        assert len(take(stream)[0]) == 1
        eventually(lambda: plane.stats().memory_used == 0, "nothing else was kept")
