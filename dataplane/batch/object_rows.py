"""The bytes of a row of an object column: its MessagePack, and its large parts next to the MessagePack.

A row without large parts is only its MessagePack. Any other row consists of a mark with which no MessagePack begins,
the number of parts, a number for each part, the parts, and the MessagePack, which names a part by its index. If the
number of a part is not negative, it is the size of the part, which is in this row. A negative number, -1 - n, means
that the part is the stored row n of the same column, so a part of several rows is stored once. Such a column is indexed
(`layout`), and its index names no stored row that is a part.

`split` trusts no byte: it copies the numbers once, and checks their bounds. `whole` returns a row with all parts in it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dataplane.batch.dedupe import distinct
from dataplane.batch.field import Field, refuse
from dataplane.batch.values import ByteRows, Values, byte_rows, offsets_of

LARGE = 4096  # the least bytes of a part
_MARK = 0xC1  # "never used", says the specification of MessagePack
_HEAD = struct.Struct("<BxxxI")

#: Returns the bytes of a stored row of the same column. Raises ValueError for an unknown row.
Lookup = Callable[[int], bytes]


class ObjectRow(NamedTuple):
    """A row before it is stored: its MessagePack, and its parts, each a buffer of bytes."""

    tree: bytes
    parts: Sequence[Any] = ()


def nowhere(number: int) -> bytes:
    """The lookup for a row that refers to no other rows. Raises ValueError."""
    raise ValueError(f"part {number} is not in this row")


def joined(row: ObjectRow) -> bytes:
    """The row as one byte string with all of its parts."""
    return b"".join(_pieces(row, {})) if row.parts else row.tree


def split(data: Any, lookup: Lookup) -> tuple[Any, list[Any]]:
    """The MessagePack of a row, and views of its parts. Raises ValueError for an invalid row."""
    if not len(data) or data[0] & 0xFF != _MARK:  # of signed bytes too
        return data, []
    view = memoryview(data).cast("B")
    if len(view) < _HEAD.size:
        raise ValueError("a row that ends early")
    _, count = _HEAD.unpack(bytes(view[: _HEAD.size]))
    at = _HEAD.size + 8 * count
    if at > len(view):
        raise ValueError(f"{count} parts in a row of {len(view)} bytes")
    parts: list[Any] = []
    for number in np.frombuffer(bytes(view[_HEAD.size : at]), np.int64).tolist():
        if number < 0:
            parts.append(lookup(-1 - number))
            continue
        if number > len(view) - at:
            raise ValueError(f"a part of {number} bytes in a row of {len(view)}")
        parts.append(view[at : at + number])
        at += number
    return view[at:], parts


def whole(data: Any, lookup: Lookup) -> Any:
    """The row with all of its parts in it; `data` itself if it has them. Raises ValueError for an invalid row."""
    elsewhere: list[int] = []

    def noted(number: int) -> bytes:
        elsewhere.append(number)
        return lookup(number)

    tree, parts = split(data, noted)
    return joined(ObjectRow(bytes(tree), parts)) if elsewhere else data


def row_of(column: str, data: Any, lookup: Lookup) -> ObjectRow:
    """A stored row as a `ObjectRow`, over the same memory. Raises Corrupt for an invalid row."""
    try:
        tree, found = split(data, lookup)
    except ValueError as error:
        raise refuse(column, f"a row is not an encoded value: {error}") from error
    return ObjectRow(bytes(tree), found)


def values_of(rows: Sequence[ObjectRow]) -> Values:
    """The rows as an object column. If any two large parts are equal, equal rows and equal parts are stored once."""
    ids = _alike([part for row in rows for part in row.parts])
    if ids is None:
        return _column([_pieces(row, {}) for row in rows])
    named = iter(ids)
    known: dict[tuple[bytes, tuple[int, ...]], int] = {}
    index: list[int] = []
    firsts: list[int] = []
    for at, row in enumerate(rows):
        place = known.setdefault((row.tree, tuple(next(named) for _ in row.parts)), len(known))
        index.append(place)
        if place == len(firsts):
            firsts.append(at)
    uses: dict[int, int] = {}
    contents: dict[int, Any] = {}
    for (_, own), at in zip(known, firsts, strict=True):
        for number, part in zip(own, rows[at].parts, strict=True):
            uses[number] = uses.get(number, 0) + 1
            contents.setdefault(number, part)
    shared = [number for number, count in uses.items() if count > 1]
    places = {number: len(known) + i for i, number in enumerate(shared)}
    stored = [
        _pieces(rows[at], {i: places[number] for i, number in enumerate(own) if number in places})
        for (_, own), at in zip(known, firsts, strict=True)
    ]
    return _column([*stored, *([contents[number]] for number in shared)], np.array(index, np.int64))


def _alike(parts: Sequence[Any]) -> list[int] | None:
    """A number for each part, equal for equal parts; None if all parts differ."""
    if len(parts) < 2:
        return None
    found, index = distinct(byte_rows("bytes", parts))
    return None if found.rows == len(parts) else index.tolist()


def _pieces(row: ObjectRow, elsewhere: dict[int, int]) -> list[Any]:
    """The buffers of a stored row. `elsewhere`: by index, the stored row of each part that is not in this row."""
    if not row.parts:
        return [row.tree]
    numbers = [-1 - elsewhere[i] if i in elsewhere else len(part) for i, part in enumerate(row.parts)]
    head = _HEAD.pack(_MARK, len(numbers)) + np.array(numbers, np.int64).tobytes()
    return [head, *(part for i, part in enumerate(row.parts) if i not in elsewhere), row.tree]


def _column(rows: Sequence[Sequence[Any]], index: Any = None) -> Values:
    """The object column of stored rows, each a list of buffers. `index`: as in `Values`."""
    if index is None and all(len(row) == 1 for row in rows):
        return byte_rows("object", [row[0] for row in rows])
    pieces = tuple(piece for row in rows for piece in row)
    edges, firsts = offsets_of(list(map(len, pieces))), offsets_of(list(map(len, rows)))
    offsets = edges[firsts]
    count = len(rows) if index is None else len(index)
    return Values(Field("object"), count, ByteRows(pieces, edges, firsts), offsets, index=index)
