"""Encodes references as bytes, and decodes untrusted bytes.

The encoding is MessagePack of arrays. Nodes, shards (with their row counts) and fields are in tables, and named by
their index there. Row numbers are ranges, or arrays of the smallest integers that hold them.

References come from other processes, and a node reads the references that clients send. So `unpack` checks everything
that the operations rely on, and raises ProtocolMismatch if it does not hold. The memory that it allocates is bounded by
the length of the bytes, not by the numbers in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Annotated

import msgspec

from dataplane.batch import cuts
from dataplane.batch.field import Field, check_field
from dataplane.batch.frame import BlockRows, Cell, ColumnPlace, Frame, ShardRef
from dataplane.batch.rows import RowIndices
from dataplane.errors import Corrupt, ProtocolMismatch

VERSION = 3

NODE_BYTES = 8

_MOST_ROWS = 1 << 48  # of a reference or a shard: sums and products of such numbers stay within 63 bits
_MOST_BYTES = 1 << 62

_FEW = 64
"""The most columns of a reference whose check is cached, because many batches have the same columns."""

_Named = tuple[tuple[str, int, int, int], ...]  # name, field, frame, slot

# The limits of a single number are checked when it is decoded.
_Number = Annotated[int, msgspec.Meta(ge=0)]
_EncodedRows = tuple[_Number, _Number, bytes]
_Ordinals = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)], ...], msgspec.Meta(min_length=1)]
_Sizes = tuple[Annotated[int, msgspec.Meta(ge=0, lt=_MOST_BYTES)], ...]
_Node = Annotated[bytes, msgspec.Meta(min_length=NODE_BYTES, max_length=NODE_BYTES)]
_Shard = tuple[_Number, _Number, Annotated[int, msgspec.Meta(ge=1, le=_MOST_ROWS)]]  # node, id, rows

MOST_TRACES = 16
"""The most spans that a reference carries."""

_Trace = Annotated[str, msgspec.Meta(max_length=64)]


class _PartRecord(msgspec.Struct, frozen=True, array_like=True):
    shards: _Number | tuple[_Number, ...]  # one for each cell, or one for all
    ordinals: _Ordinals
    nbytes: _Sizes
    rows: _EncodedRows


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    parts: tuple[_PartRecord, ...]
    order: _EncodedRows | None
    bounds: _EncodedRows | None = None


_Cut = list[cuts.Encoded]


class _Ref(msgspec.Struct, frozen=True, array_like=True):
    version: int
    rows: int
    nodes: tuple[_Node, ...]
    shards: tuple[_Shard, ...]
    fields: tuple[Field, ...]
    columns: _Named
    frames: tuple[_Frame, ...]
    origin: _Frame | None = None
    traces: Annotated[tuple[_Trace, ...], msgspec.Meta(max_length=MOST_TRACES)] = ()
    cuts: tuple[_Cut, ...] = ()  # one for each frame, or none


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Ref)


def pack(
    rows: int,
    columns: Mapping[str, ColumnPlace],
    frames: Sequence[Frame],
    origin: Frame | None,
    traces: tuple[str, ...] = (),
) -> bytes:
    nodes: dict[bytes, int] = {}
    shards: dict[ShardRef, int] = {}
    fields: dict[Field, int] = {}

    def packed(frame: Frame) -> _Frame:
        parts = []
        for cells, selected in frame.parts:
            first = cells[0].shard
            numbers: int | tuple[int, ...] = shards.setdefault(first, len(shards))
            if any(cell.shard is not first and cell.shard != first for cell in cells):
                numbers = tuple([shards.setdefault(cell.shard, len(shards)) for cell in cells])
            parts.append(
                _PartRecord(
                    numbers,
                    tuple([cell.ordinal for cell in cells]),
                    tuple([cell.nbytes for cell in cells]),
                    selected.encode(),
                )
            )
        order, bounds = (None if rows is None else rows.encode() for rows in (frame.order, frame.bounds))
        return _Frame(tuple(parts), order, bounds)

    packed_frames = tuple([packed(frame) for frame in frames])
    packed_origin = None if origin is None else packed(origin)
    named = [
        (name, fields.setdefault(field, len(fields)), frame, slot) for name, (field, frame, slot) in columns.items()
    ]
    stored = [(nodes.setdefault(shard.node, len(nodes)), shard.id, shard.rows) for shard in shards]
    encoded = tuple([cuts.encode(frame.cut) for frame in frames])
    about = (VERSION, rows, tuple(nodes), tuple(stored), tuple(fields), tuple(named))
    return _encoder.encode(_Ref(*about, packed_frames, packed_origin, traces, encoded if any(encoded) else ()))


def together(*traces: tuple[str, ...]) -> tuple[str, ...]:
    """The first `MOST_TRACES` distinct traces of several references."""
    if not any(traces):
        return ()
    return tuple(dict.fromkeys(each for several in traces for each in several))[:MOST_TRACES]


def unpack(
    encoded: bytes | bytearray | memoryview,
) -> tuple[int, dict[str, ColumnPlace], tuple[Frame, ...], Frame | None, tuple[str, ...]]:
    """The inverse of `pack`. The columns must not be changed. Raises ProtocolMismatch for other bytes."""
    try:
        ref = _decoder.decode(encoded)
        if ref.version != VERSION:
            raise ProtocolMismatch(f"a reference of version {ref.version}", ours=str(VERSION), theirs=str(ref.version))
        shards = [ShardRef(ref.nodes[node], number, rows) for node, number, rows in ref.shards]
        frames = tuple([_frame(frame, shards, ref.rows) for frame in ref.frames])
        if ref.cuts:
            found_cuts = [cuts.decode(each, ref.rows) for each in ref.cuts]
            frames = tuple([frame.with_cut(cut) for frame, cut in zip(frames, found_cuts, strict=True)])
        origin = None if ref.origin is None else _frame(ref.origin, shards, ref.rows)
        found = _known if len(ref.columns) <= _FEW else _columns
        columns = found(ref.fields, ref.columns, tuple([frame.width for frame in frames]), ref.rows > 0)
        return ref.rows, columns, frames, origin, ref.traces
    except (msgspec.MsgspecError, ValueError, IndexError, OverflowError, RecursionError, Corrupt) as error:
        why = "" if isinstance(error, msgspec.MsgspecError) else f": {error}"  # its text names the codec's own types
        raise ProtocolMismatch(f"these bytes are no reference that encode() made{why}", ours=str(VERSION)) from error


def _within(value: int, limit: int, what: str) -> int:
    if not 0 <= value < limit:
        raise ValueError(f"{what} {value} is not in 0..{limit - 1}")
    return value


def _columns(
    fields: tuple[Field, ...], columns: _Named, widths: tuple[int, ...], any_rows: bool
) -> dict[str, ColumnPlace]:
    """The columns by name, in frames of these widths. Raises ValueError or Corrupt."""
    for field in fields:
        check_field("", field)
        if field.declared is not field:
            raise ValueError("a field of what is stored, and not of what is read")
    named: dict[str, ColumnPlace] = {}
    for name, number, frame, slot in columns:
        width = widths[_within(frame, len(widths), "frame")]
        _within(slot, width if any_rows else _MOST_ROWS, "slot")
        named[name] = ColumnPlace(fields[_within(number, len(fields), "field")], frame, slot)
    if not named or len(named) != len(columns):
        raise ValueError("no columns, or two of one name")
    if len({frame for _, _, frame, _ in columns}) != len(widths):
        raise ValueError("a frame without columns")
    return named


_known = lru_cache(maxsize=256)(_columns)


def _frame(frame: _Frame, shards: Sequence[ShardRef], rows: int) -> Frame:
    parts = tuple([_part(part, shards) for part in frame.parts])
    listed = sum(len(part.rows) for part in parts)
    if len({len(part.cells) for part in parts}) > 1:
        raise ValueError("parts of one frame with different columns")
    order = None if frame.order is None else RowIndices.decode(frame.order)
    if order is not None:
        # All numbers are below `listed`, so with as many distinct ones, the order has each row.
        if not listed or order.stop > listed or len(order.distinct()[0]) != listed:
            raise ValueError("an order that is not one of the rows listed")
        listed = len(order)
    bounds = None if frame.bounds is None else _bounds(RowIndices.decode(frame.bounds), listed)
    if bounds is not None:
        listed = len(bounds) - 1
    if listed != _within(rows, _MOST_ROWS, "row"):
        raise ValueError(f"{listed} rows in a frame of {rows}")
    return Frame(parts, order, bounds)


def _bounds(bounds: RowIndices, listed: int) -> RowIndices:
    """The bounds themselves. Raises ValueError unless they cover each of the `listed` rows once, in order, and join
    some: a range would join none, and its array could be large."""
    if bounds.slice is not None:
        raise ValueError("bounds that join no rows")
    edges = bounds.array()
    if not listed or len(edges) < 2 or edges[0] or int(edges[-1]) != listed or not (edges[1:] > edges[:-1]).all():
        raise ValueError("bounds that do not join the rows listed")
    return bounds


def _part(part: _PartRecord, shards: Sequence[ShardRef]) -> BlockRows:
    rows, numbers = RowIndices.decode(part.rows), part.shards
    of = [shards[number] for number in ((numbers,) * len(part.ordinals) if isinstance(numbers, int) else numbers)]
    cells = tuple([Cell(*cell) for cell in zip(of, part.ordinals, part.nbytes, strict=True)])
    if not len(rows) or rows.stop > min([shard.rows for shard in of]):
        raise ValueError("a part without rows, or with rows that its shards lack")
    return BlockRows(cells, rows)
