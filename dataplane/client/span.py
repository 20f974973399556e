"""A get of contiguous rows of one shard, as most gets of a batch are, without the work that many shards need.

The general path (`client.held_shards`, `client.column_assembly`) makes a table of places, a pin for a quarter of the
bytes, pieces and selections. Contiguous rows need none of that, and the columns of batch after batch are the same:
which of a shard's columns those of a reference are, and that they fit, is determined once (`_layouts`).

Invariants: the result is that of the general path, and so are the errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache

from dataplane.batch.batch import Batch, Column
from dataplane.batch.field import Field, refuse
from dataplane.batch.layout import ColumnLayout
from dataplane.batch.layout_check import CheckedLayout, check_layout
from dataplane.batch.ref import Span
from dataplane.batch.stored_column import Memory, Selection, Stored, check_fits
from dataplane.client.memory import CarriedShard, HeldShard, Segment
from dataplane.client.pins import Pin
from dataplane.errors import Misuse, ProtocolMismatch
from dataplane.wire import messages as m
from dataplane.wire.places import ShardPlace, only

_FEW = 64
"""Columns up to which it is remembered which of a shard's they are."""


class SpanShard:
    """The shard of a reply, with a validated layout. Holds nothing until it is `opened`."""

    def __init__(self, reply: m.Held) -> None:
        """Raises ProtocolMismatch, Corrupt."""
        self._place: ShardPlace = only(reply.places)
        self._carried = reply.carried
        if not 0 <= self._place.layout < len(reply.layouts):
            raise ProtocolMismatch("a shard without a layout")
        self._laid = check_layout(reply.layouts[self._place.layout], self._place.size)

    def opened(self, span: Span, segments: Mapping[int, Segment], pin: Callable[[int], Pin]) -> Batch:
        """The columns of these rows. Raises Corrupt, and Misuse if the shard has no such column; the pin that the
        node granted is then dropped, as with the batch."""
        number, segment, offset, size, *_ = self._place
        memory: Memory
        if segment < 0:
            memory = CarriedShard(self._carried, offset, size)
        else:
            held = pin(number)  # dropped with an error, too
            memory = HeldShard(segments[segment], offset, size, held)
        layouts = (_known if len(span.columns) <= _FEW else _layouts)(span.columns, self._laid)
        rows, columns = span.rows, {}
        if rows.stop > self._laid.rows:
            raise refuse(span.columns[0][0], f"row {rows.stop - 1} of a shard with {self._laid.rows}")
        for (name, field, _), layout in zip(span.columns, layouts, strict=True):
            columns[name] = Column.of(name, field, (Selection(Stored(name, layout, memory), rows),))
        return Batch(columns)


def _layouts(columns: tuple[tuple[str, Field, int], ...], laid: CheckedLayout) -> tuple[ColumnLayout, ...]:
    """The places of columns with these names, fields and ordinals, validated."""
    there = laid.layout.columns
    found = []
    for name, field, ordinal in columns:
        if ordinal >= len(there):
            raise Misuse(f"the reference means column {ordinal} of a shard that has {len(there)}")
        layout = there[ordinal][1]
        check_fits(name, layout.field, field)
        found.append(layout)
    return tuple(found)


_known = lru_cache(maxsize=256)(_layouts)
