"""A reference as bytes, and back without believing them.

MessagePack of arrays. What references repeat is in tables and named by number: nodes, shards (with their
rows), fields. Row numbers are ranges, or arrays of the smallest integers that hold them.

A reference comes from anywhere a pickle does, and a node reads those that clients send. So `unpack` checks all
that the algebra relies on, and gives ProtocolMismatch for anything else. What it allocates is bounded by the
length of the bytes, whatever numbers stand in them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dataplane.batch.field import Field, check_field
from dataplane.batch.frame import Cell, Frame, Part, Shard
from dataplane.batch.rows import Rows
from dataplane.errors import Corrupt, ProtocolMismatch

VERSION = 1
NODE_BYTES = 8

_MOST_ROWS = 1 << 48  # of a reference or a shard: sums and products of such numbers stay within 63 bits
_MOST_BYTES = 1 << 62

#: name, field, frame, slot
Named = tuple[str, Field, int, int]

_EncodedRows = tuple[int, int, bytes]


class _Part(msgspec.Struct, frozen=True, array_like=True):
    shards: int | tuple[int, ...]  # one a cell, or one for all
    ordinals: tuple[int, ...]
    nbytes: tuple[int, ...]
    rows: _EncodedRows


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    parts: tuple[_Part, ...]
    order: _EncodedRows | None


class _Ref(msgspec.Struct, frozen=True, array_like=True):
    version: int
    rows: int
    nodes: tuple[bytes, ...]
    shards: tuple[tuple[int, int, int], ...]  # node, id, rows
    fields: tuple[Field, ...]
    columns: tuple[tuple[str, int, int, int], ...]  # name, field, frame, slot
    frames: tuple[_Frame, ...]
    origin: _Frame | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Ref)


def pack(rows: int, columns: Sequence[Named], frames: Sequence[Frame], origin: Frame | None) -> bytes:
    """The bytes of a reference."""
    nodes: dict[bytes, int] = {}
    shards: dict[Shard, int] = {}
    fields: dict[Field, int] = {}

    def packed(frame: Frame) -> _Frame:
        parts = []
        for cells, selected in frame.parts:
            numbers = tuple([shards.setdefault(cell.shard, len(shards)) for cell in cells])
            parts.append(
                _Part(
                    numbers[0] if len(set(numbers)) == 1 else numbers,
                    tuple([cell.ordinal for cell in cells]),
                    tuple([cell.nbytes for cell in cells]),
                    selected.encode(),
                )
            )
        return _Frame(tuple(parts), None if frame.order is None else frame.order.encode())

    packed_frames = tuple([packed(frame) for frame in frames])
    packed_origin = None if origin is None else packed(origin)
    named = [(name, fields.setdefault(field, len(fields)), frame, slot) for name, field, frame, slot in columns]
    stored = [(nodes.setdefault(shard.node, len(nodes)), shard.id, shard.rows) for shard in shards]
    ref = _Ref(VERSION, rows, tuple(nodes), tuple(stored), tuple(fields), tuple(named), packed_frames, packed_origin)
    return _encoder.encode(ref)


def unpack(encoded: bytes | bytearray | memoryview) -> tuple[int, list[Named], tuple[Frame, ...], Frame | None]:
    """What `pack` was given. Raises ProtocolMismatch where it was given nothing of the kind."""
    try:
        ref = _decoder.decode(encoded)
        if ref.version != VERSION:
            raise ProtocolMismatch(f"a reference of version {ref.version}", ours=str(VERSION), theirs=str(ref.version))
        shards = _shards(ref)
        frames = tuple([_frame(frame, shards, ref.rows) for frame in ref.frames])
        origin = None if ref.origin is None else _frame(ref.origin, shards, ref.rows)
        return ref.rows, _columns(ref, frames), frames, origin
    except (msgspec.MsgspecError, ValueError, RecursionError, Corrupt) as error:
        raise ProtocolMismatch(f"not a reference: {error}", ours=str(VERSION)) from error


def _within(value: int, limit: int, what: str) -> int:
    if not 0 <= value < limit:
        raise ValueError(f"{what} {value} is not in 0..{limit - 1}")
    return value


def _shards(ref: _Ref) -> list[Shard]:
    if any(len(node) != NODE_BYTES for node in ref.nodes):
        raise ValueError(f"a node that is not {NODE_BYTES} bytes")
    shards = []
    for node, number, rows in ref.shards:
        _within(number, 1 << 64, "shard")
        _within(rows - 1, _MOST_ROWS, "the last row of a shard,")
        shards.append(Shard(ref.nodes[_within(node, len(ref.nodes), "node")], number, rows))
    return shards


def _columns(ref: _Ref, frames: Sequence[Frame]) -> list[Named]:
    for field in ref.fields:
        check_field("", field)
    named = []
    for name, number, frame, slot in ref.columns:
        width = frames[_within(frame, len(frames), "frame")].width
        _within(slot, width if ref.rows else _MOST_ROWS, "slot")
        named.append((name, ref.fields[_within(number, len(ref.fields), "field")], frame, slot))
    if not named or len({name for name, *_ in named}) != len(named):
        raise ValueError("no columns, or two of one name")
    if len({frame for _, _, frame, _ in named}) != len(frames):
        raise ValueError("a frame without columns")
    return named


def _frame(frame: _Frame, shards: Sequence[Shard], rows: int) -> Frame:
    parts = tuple([_part(part, shards) for part in frame.parts])
    listed = sum(len(part.rows) for part in parts)
    if len({len(part.cells) for part in parts}) > 1:
        raise ValueError("parts of one frame with different columns")
    order = None if frame.order is None else Rows.decode(frame.order)
    if order is not None:
        # As many listed as there are different ones in the order, which are below that: each is in it.
        if not listed or order.stop > listed or len(order.distinct()[0]) != listed:
            raise ValueError("an order that is not one of the rows listed")
        listed = len(order)
    if listed != _within(rows, _MOST_ROWS, "row"):
        raise ValueError(f"{listed} rows in a frame of {rows}")
    return Frame(parts, order)


def _part(part: _Part, shards: Sequence[Shard]) -> Part:
    numbers = part.shards if isinstance(part.shards, tuple) else (part.shards,) * len(part.ordinals)
    cells = []
    for number, ordinal, nbytes in zip(numbers, part.ordinals, part.nbytes, strict=True):
        shard = shards[_within(number, len(shards), "shard")]
        cells.append(Cell(shard, _within(ordinal, 1 << 32, "column"), _within(nbytes, _MOST_BYTES, "size")))
    rows = Rows.decode(part.rows)
    if not cells or rows.stop > min(cell.shard.rows for cell in cells) or not len(rows):
        raise ValueError("a part without columns or rows, or with rows that its shards lack")
    return Part(tuple(cells), rows)
