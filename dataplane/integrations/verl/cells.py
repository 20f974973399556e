"""Where the rows of TransferQueue's fields are: the index that its controller keeps for us.

The controller holds a value for each row and field that a storage backend gives it, and hands them to every reader with
the rest of its metadata. Ours is a cell: which node, shard and column, what the column is, and which row of it. A cell
needs nothing but itself, so no process has to know another or the order in which fields came, and a row's fields may
come from anywhere. It is some 50 bytes: TransferQueue's own share of a row and field is larger.

What always holds: a cell is checked before it is used, and what is none raises Corrupt; the references that are made
of cells have a part for each put that rows came by, not for each row.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.batch.concat import concat
from dataplane.batch.field import Field, check_field
from dataplane.batch.ref import BatchRef
from dataplane.errors import Corrupt
from dataplane.integrations.verl.planes import with_plane

TENSOR, DENSE, ROWS, WRAPPED = b"t", b"d", b"r", b"w"
"""How a column's rows are given back: as a tensor; the same, put dense; as they are; each out of a tuple of one."""

_WAYS = (TENSOR, DENSE, ROWS, WRAPPED)
_CLASS = {DENSE: TENSOR}  # rows of both can be one tensor
_ROW = struct.Struct("<Q")  # which row; first, so that what follows is the same for all rows of a put
_COLUMN = struct.Struct("<c8sQQIQ")  # how, node, shard, its rows, ordinal, logical bytes
_SHARD_AT, _SHARD = _ROW.size + 1 + 8, struct.Struct("<Q")  # where a cell names its shard
_MOST = 1 << 48

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Field).decode


class Stored(NamedTuple):
    """A stored column: how its rows are to be given back (`entries`), and what a reference to it needs."""

    how: bytes
    node: bytes
    shard: int
    rows: int
    ordinal: int
    nbytes: int
    field: Field


class Found(NamedTuple):
    """Rows that can be read together: the reference, and of each of its columns how its rows are given back and which
    of the rows that were asked for they are (None: all, in order)."""

    ref: BatchRef
    how: dict[str, bytes]
    positions: npt.NDArray[np.int64] | None


def cells(ref: BatchRef, how: Mapping[str, bytes]) -> dict[str, list[bytes]]:
    """The cells of what was just put, by field, one a row."""
    numbers = [_ROW.pack(row) for row in range(len(ref))]
    made = {}
    for name, field in ref.schema.items():
        ((node, shard, ordinal, _),) = ref.pieces(name)
        nbytes = ref.select(name).nbytes
        column = _COLUMN.pack(how[name], node, shard, len(ref), ordinal, nbytes) + _encode(field)
        made[name] = [number + column for number in numbers]
    return made


def retained(several: Sequence[bytes]) -> list[bytes]:
    """Another cell of each stored value, which stays until both were freed: all or none. Raises Freed, OwnerDied,
    Corrupt, LimitExceeded, PeerUnavailable."""
    refs = list(map(_alone, several))
    links = [shard for ref in with_plane(lambda plane: plane.retain_each(refs)) for _, shard in ref.shards()]
    return [
        cell[:_SHARD_AT] + _SHARD.pack(link) + cell[_SHARD_AT + _SHARD.size :]
        for cell, link in zip(several, links, strict=True)
    ]


def _alone(cell: bytes) -> BatchRef:
    """A reference to the row of one cell."""
    stored = _stored(cell[_ROW.size :])
    (row,) = _ROW.unpack_from(cell)
    if row >= stored.rows:
        raise Corrupt("a cell names a row that its shard does not have")
    return BatchRef.of(stored.node, stored.rows, [("", stored.field, stored.nbytes, stored.shard, stored.ordinal)])[
        row : row + 1
    ]


def node(cell: bytes) -> bytes:
    """The node that has the value. Raises Corrupt."""
    return _stored(cell[_ROW.size :]).node


def way(cell: bytes) -> bytes:
    """How the row is given back."""
    return cell[_ROW.size : _ROW.size + 1]


def given_back_as(cell: bytes, other: bytes) -> bytes:
    """The cell, whose row is given back as that of the other."""
    return cell[: _ROW.size] + way(other) + cell[_ROW.size + 1 :]


def _stored(column: bytes) -> Stored:
    try:
        how, node, shard, rows, ordinal, nbytes = _COLUMN.unpack_from(column)
        field = _field(column[_COLUMN.size :])
    except (struct.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"what TransferQueue's controller keeps of a row is no cell of this backend: {error}") from error
    if how not in _WAYS or not 0 < rows < _MOST or nbytes >= 1 << 62:
        raise Corrupt(f"a cell of a column of {rows} rows and {nbytes} bytes, given back as {how!r}")
    return Stored(how, node, shard, rows, ordinal, nbytes, field)


@lru_cache(maxsize=1 << 10)
def _field(told: bytes) -> Field:
    """Columns are as many as puts, and what they are is few: it is remembered by itself, so that a process which clears
    or reads for hours keeps nothing of what is gone."""
    field = _decode(told)
    check_field("", field)
    return field


def find(fields: Mapping[str, Sequence[bytes | None]]) -> list[Found]:
    """The rows that the cells of each field name, in as few references as can be; a row without a cell is left out.

    Rows of one field that can not be one column (text here, dicts there) are in several. Raises Corrupt.
    """
    alike: defaultdict[object, list[tuple[str, list[Stored], _Pattern]]] = defaultdict(list)
    for name, listed in fields.items():
        for stored, pattern in _classes(listed):
            places = tuple((each.node, each.rows) for each in stored)
            alike[pattern.key, places].append((name, stored, pattern))
    by_positions: defaultdict[bytes | None, list[Found]] = defaultdict(list)
    for several in alike.values():
        pattern = several[0][2]
        ref = _joined([(name, stored) for name, stored, _ in several], pattern)
        key = None if pattern.positions is None else pattern.positions.tobytes()
        how = {name: _how({each.how for each in stored}) for name, stored, _ in several}
        by_positions[key].append(Found(ref, how, pattern.positions))
    return [found for beside in by_positions.values() for found in _united(beside)]


class _Pattern(NamedTuple):
    """How the rows of a column come from stored ones: for each stored column the rows of it, and then the order."""

    rows: list[npt.NDArray[np.int64]]
    order: npt.NDArray[np.int64] | None
    positions: npt.NDArray[np.int64] | None

    @property
    def key(self) -> object:
        order = None if self.order is None else self.order.tobytes()
        positions = None if self.positions is None else self.positions.tobytes()
        return tuple(rows.tobytes() for rows in self.rows), order, positions


def _classes(listed: Sequence[bytes | None]) -> Iterable[tuple[list[Stored], _Pattern]]:
    """The rows of one field, parted by what can be one column."""
    places = [place for place, cell in enumerate(listed) if cell is not None]
    present = [cell for cell in listed if cell is not None]
    rows: npt.NDArray[Any]
    try:
        rows = np.frombuffer(b"".join([cell[: _ROW.size] for cell in present]), "<u8")
    except ValueError:
        raise Corrupt("what TransferQueue's controller keeps of a row is no cell of this backend") from None
    numbers: dict[bytes, int] = {}
    of = np.array([numbers.setdefault(cell[_ROW.size :], len(numbers)) for cell in present], np.int64)
    stored = [_stored(column) for column in numbers]
    if len(of) and (rows >= np.array([each.rows for each in stored], np.uint64)[of]).any():
        raise Corrupt("a cell names a row that its shard does not have")
    rows = rows.astype(np.int64)
    kinds: dict[object, list[int]] = {}
    for number, each in enumerate(stored):
        kinds.setdefault((_CLASS.get(each.how, each.how), _kind(each.field)), []).append(number)
    for chosen in kinds.values():
        inside = np.flatnonzero(np.isin(of, chosen)) if len(kinds) > 1 else np.arange(len(of))
        whole = len(inside) == len(listed)
        pattern = _pattern(rows[inside], of[inside], chosen, None if whole else np.array(places, np.int64)[inside])
        yield [stored[number] for number in chosen], pattern


def _pattern(
    rows: npt.NDArray[np.int64],
    of: npt.NDArray[np.int64],
    chosen: Sequence[int],
    positions: npt.NDArray[np.int64] | None,
) -> _Pattern:
    order = np.argsort(of, kind="stable")  # numbers ascend as they are first met
    edges = np.searchsorted(of[order], [*chosen, chosen[-1] + 1])
    parts = np.split(rows[order], edges[1:-1])
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    in_order = bool((order[1:] > order[:-1]).all())
    return _Pattern(parts, None if in_order else back, positions)


def _how(several: set[bytes]) -> bytes:
    """How rows of one column are given back that came in these ways, of one class."""
    return several.pop() if len(several) == 1 else TENSOR


def _kind(field: Field) -> object:
    """Equal for fields whose rows can be one column."""
    return field.kind, field.dtype, len(field.shape), tuple((name, _kind(child)) for name, child in field.children)


def _joined(columns: Sequence[tuple[str, list[Stored]]], pattern: _Pattern) -> BatchRef:
    """The columns, which come from the same puts in the same way, as one reference."""
    parts = []
    for number, rows in enumerate(pattern.rows):
        first = columns[0][1][number]
        described = [
            (name, s[number].field, s[number].nbytes, s[number].shard, s[number].ordinal) for name, s in columns
        ]
        whole = BatchRef.of(first.node, first.rows, described)
        parts.append(whole if _is_whole(rows, first.rows) else whole[rows])
    ref = concat(parts)
    return ref if pattern.order is None else ref[pattern.order]


def _is_whole(rows: npt.NDArray[np.int64], of: int) -> bool:
    return len(rows) == of and bool((rows == np.arange(of)).all())


def _united(beside: Sequence[Found]) -> Iterable[Found]:
    """References to the same rows as one; those that have the same field stay apart."""
    while beside:
        first, *others = beside
        apart = []
        for other in others:
            if first.how.keys() & other.how.keys():
                apart.append(other)
            else:
                first = Found(first.ref.union(other.ref), {**first.how, **other.how}, first.positions)
        yield first
        beside = apart
