"""Which rows of a stream the rows of a reference are: an origin, a frame whose parts name streams instead of shards.

A part's one cell has the stream (8 bytes) where a shard has its node, and the number under which the stream delivered
the rows where a shard has its number. So an origin is sliced, picked and repeated as the rows themselves are. It comes
from anywhere with the reference, and no more is believed of it than that it is a frame.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dataplane.batch.frame import Cell, Frame, Part, Shard
from dataplane.batch.rows import Index, Rows
from dataplane.errors import Misuse

#: Rows that a stream is taken to have.
_STREAM_ROWS = 1 << 47

#: Of the number of a delivery, which is to be an int64.
_HOLD = (1 << 63) - 1


def of(stream: bytes, rows: npt.ArrayLike, hold: int) -> Frame:
    """The origin of these rows (numbers, int64) of a stream, delivered under the number `hold`."""
    part, order = Rows.index(rows).distinct()
    cell = Cell(Shard(stream, hold, _STREAM_ROWS), 0, 0)
    return Frame((Part((cell,), part),), None if order is None else Rows.index(order))


def one(origin: Frame) -> tuple[bytes, Index]:
    """The stream and the numbers in it of all rows, in order. Raises Misuse where they are of several streams."""
    streams = {part.cells[0].shard.node for part in origin.parts}
    if len(streams) > 1:
        raise Misuse("these rows come from several streams; extend each with its own")
    return streams.pop(), _in_order(origin, _numbers(origin))


def each(origin: Frame) -> list[tuple[bytes, Index, Index]]:
    """Of each stream, which of the rows (positions, ascending) are its, and their numbers in it."""
    streams = [part.cells[0].shard.node for part in origin.parts]
    known = list(dict.fromkeys(streams))
    of = np.repeat([known.index(stream) for stream in streams], [len(part.rows) for part in origin.parts])
    rows, of = _in_order(origin, _numbers(origin)), _in_order(origin, of)
    found = [(stream, np.flatnonzero(of == number)) for number, stream in enumerate(known)]
    return [(stream, at, rows[at]) for stream, at in found]


def holds(origin: Frame) -> Index:
    """The numbers under which the rows were delivered, in order, int64."""
    listed = [np.full(len(part.rows), part.cells[0].shard.id & _HOLD, np.int64) for part in origin.parts]
    return _in_order(origin, np.concatenate(listed))


def _numbers(origin: Frame) -> Index:
    listed = [part.rows.array() for part in origin.parts]
    return np.concatenate(listed) if len(listed) > 1 else listed[0]


def _in_order(origin: Frame, values: Index) -> Index:
    return values if origin.order is None else values[origin.order.array()]
