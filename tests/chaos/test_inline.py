"""Appends and extends that carry their columns in one request: whoever waits, goes or lies leaves nothing."""

from __future__ import annotations

from typing import Any

import dataplane as dp
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm
from dataplane.wire import shard_messages as sm
from tests.cases import each_case
from tests.chaos.raw import Raw, int64s, one_column, token
from tests.processes import StandingNode, eventually

NODE = {"spill": 0, "memory": "8MiB"}


def take(stream: Any, rows: int = 100, columns: tuple[str, ...] = ("x",)) -> list[Any]:
    with stream.consume("a", rows=rows, columns=columns, timeout=60) as delivery:
        got = delivery.get()
        return [got[name].to_list() for name in columns]


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
    "bytes of no column": {"columns": rm.Inline(bytes(64), ROW, [])},
    "bytes of two columns": {"columns": rm.Inline(bytes(64), ROW, [64, 64])},
    "fewer bytes than none": {"columns": rm.Inline(bytes(64), ROW, [-1])},
    "bytes beyond all memory": {"columns": rm.Inline(bytes(64), ROW, [1 << 62])},
    "no layout": {"columns": rm.Inline(bytes(64), b"nonsense", [64])},
    "a layout of other bytes": {"columns": rm.Inline(bytes(64), one_column(1, rows=1, width=5000), [64])},
    "no rows": {"columns": rm.Inline(b"", one_column(0, rows=0), [0])},
    "too many bytes": {"columns": rm.Inline(bytes(sm.MAX_INLINE + 1), ROW, [64])},
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
