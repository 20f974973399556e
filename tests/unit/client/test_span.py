"""Rows in one run of one shard: the short way gives what the long one gives, and refuses what that refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dataplane.batch import locations
from dataplane.batch.batch import Batch
from dataplane.batch.field import Field
from dataplane.batch.locations import RowSpan, ref_to
from dataplane.batch.put_plan import layout_of, plan
from dataplane.batch.ref import BatchRef
from dataplane.client.memory import NodeSegment
from dataplane.client.pins import ShardPin
from dataplane.client.reader import SpanShard
from dataplane.client.writer import _payload
from dataplane.errors import Corrupt
from dataplane.wire import shard_messages as sm
from dataplane.wire.places import pack

NODE = bytes(range(8))
COLUMNS = {
    "ids": [[1, 2, 3], [], [4]],
    "logp": np.arange(12, dtype=np.float32).reshape(3, 4),
    "flag": np.array([True, False, True]),
    "text": ["a", "", "ccc"],
    "info": [{"x": 1}, {"x": 2}, {"x": 3}],
}


def stored(columns: dict[str, Any]) -> tuple[BatchRef, bytes, bytes]:
    """A reference to all of a shard of these columns, its layout, and its bytes."""
    planned = plan(columns)
    placed = [(c.name, c.field, c.logical_nbytes, 7, i) for i, c in enumerate(planned.columns)]
    return ref_to(NODE, planned.rows, placed), layout_of(planned.columns), _payload(planned.columns)


def answer(layout: bytes, payload: bytes, *, places: bytes | None = None) -> sm.Held:
    """As a node answers for a small shard, whose bytes it carries."""
    told = pack([7, -1, 0, len(payload), 0, 0]) if places is None else places
    return sm.Held(1, told, [layout], [], carried=payload)


def opened(span: RowSpan | None, reply: sm.Held) -> Batch:
    assert span is not None
    segments: dict[int, NodeSegment] = {}
    return SpanShard(reply).opened(span, segments, ShardPin)


def test_only_contiguous_rows_of_one_shard_form_a_span() -> None:
    ref, _, _ = stored(COLUMNS)
    other = ref_to(NODE, 3, [("more", Field("dense", "float32", ()), 12, 8, 0)])
    assert locations.span_of(ref[[0, 2]]) is None
    assert locations.span_of(ref[[2, 1, 0]]) is None
    assert locations.span_of(ref.union(other)) is None
    assert locations.span_of(ref[0:0]) is None
    assert locations.span_of(locations.numbered(ref, lambda key: key[1] | 1 << 40)) is None  # a link


def test_an_answer_that_carries_too_little_is_refused() -> None:
    ref, layout, payload = stored(COLUMNS)
    reply = answer(layout, payload[:-64], places=pack([7, -1, 0, len(payload), 0, 0]))
    with pytest.raises(Corrupt):
        opened(locations.span_of(ref), reply)
