"""A batch as bytes that another rank can read in place: a header, and runs of bytes with their positions.

The sender's runs are the memory of its batch, in the shared memory if rows lie in one run. The receiver's memory is one
block of the header's `nbytes`; each column's buffers lie in it as in a shard (`batch.layout`). A run is split into
pieces of at most `PIECE` bytes, and short neighbouring runs are one piece.

Rows of a reference may repeat (`BatchRef.repeat`), and a stored row may stand for several rows (`put(dedupe=...)`).
Each stored row is sent once.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from dataplane.batch.batch import Batch, Column
from dataplane.batch.field import Field, typed
from dataplane.batch.layout import Bytes, ColumnLayout, Index, aligned
from dataplane.batch.layout_check import check_layout
from dataplane.batch.put_plan import layout_of, plan
from dataplane.batch.rows import RowIndices
from dataplane.batch.stored_column import Selection, StoredColumn
from dataplane.collective.memory import ReceivedBlock
from dataplane.errors import ProtocolMismatch

PIECE = 8 << 20
"""The largest piece in bytes. Broadcasts of 288 MiB to 4 ranks of one host, over gloo, as multiples of torch's rate,
medians of seven: 0.79 and 0.80 with 1 MiB, 0.92 to 0.98 with 4 (three runs), 1.00 to 1.12 with 8 (seven), 0.95 with 16
(one). The runs of different sizes did not alternate; single ratios varied by 0.2 or more."""

SHORT = 64 << 10
"""Bytes from which on a run is a piece of its own."""


class PackedHeader(msgspec.Struct, frozen=True, array_like=True):
    """The information for a receiver: the encoded layout of each column; for columns with repeated rows, the index
    of the stored row that each row uses; the total bytes; the positions of the pieces, in the order in which they are
    sent.

    Each column has a layout of its own: if rows repeat in one column only, the columns store different numbers of
    rows."""

    layouts: list[bytes]
    orders: dict[str, tuple[int, int, bytes]]
    nbytes: int
    pieces: list[tuple[int, int]]


class PackedBatch(msgspec.Struct, frozen=True, eq=False):
    """A batch that is ready to be sent. `pieces` are the bytes of each piece; they keep the batch's memory alive."""

    header: bytes
    pieces: list[Bytes]


def pack(batch: Batch) -> PackedBatch:
    """The batch's distinct stored rows, in place if they lie in one run, else gathered. Raises Corrupt."""
    layouts: list[bytes] = []
    orders, runs, base = {}, [], 0
    for name, column in batch.items():
        once, order = distinct(column)
        (planned,) = plan({name: once}).columns
        layouts.append(layout_of((planned,), base))
        if order is not None:
            orders[name] = RowIndices.index(order).encode()
        start = base
        for buffer in planned.buffers:
            runs.append((start, buffer if isinstance(buffer, np.ndarray) else buffer.run()))
            start += aligned(buffer.nbytes)
        base = start
    places, pieces = [], []
    for start, piece in _pieces(runs):
        places.append((start, start + len(piece)))
        pieces.append(piece)
    header = PackedHeader(layouts, orders, base, places)
    return PackedBatch(msgspec.msgpack.encode(header), pieces)


def opened(encoded: bytes) -> PackedHeader:
    """The decoded header of another rank. Raises ProtocolMismatch if it is invalid."""
    try:
        header = msgspec.msgpack.decode(encoded, type=PackedHeader)
    except msgspec.DecodeError as error:
        raise ProtocolMismatch(f"a rank sent a header that is none: {error}") from None
    edges = [edge for piece in header.pieces for edge in piece]
    if edges != sorted(edges) or (edges and not 0 <= edges[0] <= edges[-1] <= header.nbytes):
        raise ProtocolMismatch("a rank sent a header whose pieces do not follow one another")
    return header


def numbers(header: PackedHeader) -> list[tuple[int, int]]:
    """The byte ranges of columns that become tensors, as (start, stop)."""
    found = []
    for _, layout in _columns(header):
        if layout.field.kind in ("dense", "ragged"):
            start, nbytes = layout.buffers[0 if layout.field.kind == "dense" else 1]
            found.append((start, start + nbytes))
    return found


def fields(header: PackedHeader) -> list[tuple[str, Field]]:
    """The columns by their names."""
    return [(name, typed(layout.field)) for name, layout in _columns(header)]


def unpacked(header: PackedHeader, memory: ReceivedBlock) -> Batch:
    """The batch of the header, over memory with all of its pieces. Raises Corrupt; for tables at the first use."""
    columns = {}
    for name, layout in _columns(header):
        rows = header.orders.get(name)
        order = None if rows is None else RowIndices.decode(rows).array()
        selection = Selection(StoredColumn(name, layout, memory), RowIndices.range(0, layout.rows))
        columns[name] = Column(name, layout.field, [selection], order)
    return Batch(columns)


def _columns(header: PackedHeader) -> list[tuple[str, ColumnLayout]]:
    """The columns, checked. Raises ProtocolMismatch, Corrupt."""
    return [column for each in header.layouts for column in check_layout(each, header.nbytes).layout.columns]


def _pieces(runs: list[tuple[int, Bytes]]) -> Iterator[tuple[int, Bytes]]:
    """The runs, split or joined, each with its position."""
    short: list[tuple[int, Bytes]] = []
    for start, run in runs:
        if len(run) < SHORT:
            if len(run):
                short.append((start, run))
            if short and start + len(run) - short[0][0] >= SHORT:
                yield _together(short)
                short = []
            continue
        if short:
            yield _together(short)
            short = []
        for at in range(0, len(run), PIECE):
            yield start + at, run[at : at + PIECE]
    if short:
        yield _together(short)


def _together(short: list[tuple[int, Bytes]]) -> tuple[int, Bytes]:
    (first, _), (last, run) = short[0], short[-1]
    joined = np.zeros(last + len(run) - first, np.uint8)
    for start, each in short:
        joined[start - first : start - first + len(each)] = each
    return first, joined


def distinct(column: Column) -> tuple[Column, Index | None]:
    """The column's distinct stored rows, in the order in which they are stored, and for each row of the column its
    position among those; the column itself and None where no row comes twice."""
    reading = column.reading
    if reading.run is not None or not reading.rows:
        return column, None
    part, rows = reading.places()
    once, order = np.unique(np.stack([part, rows]), axis=1, return_inverse=True)
    if once.shape[1] == len(rows):
        return column, None
    selections = []
    for number, (stored, _) in enumerate(reading.parts):
        chosen = once[1][once[0] == number]
        if len(chosen):
            selections.append(_selected(stored, chosen))
    return Column(column.name, column.field, selections), order.reshape(-1).astype(np.int64)


def _selected(stored: StoredColumn, rows: Index) -> Selection:
    """These stored rows. Objects are named by the index: without it, parts that rows have in common are not found."""
    index = stored.tables.stored_row
    if stored.layout.field.kind != "object" or index is None:
        return Selection(stored.unindexed(), RowIndices.index(rows))
    named, first = np.unique(index, return_index=True)
    return Selection(stored, RowIndices.index(first[np.searchsorted(named, rows)]))
