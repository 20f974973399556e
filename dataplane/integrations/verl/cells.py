"""Cells: the locations of the rows of TransferQueue's fields, which its controller stores for us.

The controller stores a value of the backend for each row and field, and returns it to every reader with the other
metadata. Our value is a cell: the node, the shard, the column with its field, and the row in it. A cell is
self-contained, so no process needs to know another process or the order in which fields were put, and the fields of a
row may come from anywhere. It has about 50 bytes, less than TransferQueue's own record of a row and field.

Invariants: a cell is checked before it is used, and an invalid one raises Corrupt; a reference made of cells has one
part for each put that its rows came from, not one for each row.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from operator import methodcaller
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.batch.concat import concat, described, of_rows
from dataplane.batch.field import Field, check_field
from dataplane.batch.frame import Cell, ShardRef
from dataplane.batch.locations import ref_to
from dataplane.batch.ref import BatchRef
from dataplane.batch.shard_ids import shard_of
from dataplane.client import stored_rows
from dataplane.errors import Corrupt, DataplaneError
from dataplane.integrations.process import with_plane

TENSOR, DENSE, ROWS = b"t", b"d", b"r"
"""How the rows of a column are returned: as a tensor; as a tensor that was put dense; as they are."""

_WAYS = (TENSOR, DENSE, ROWS)
_CLASS = {DENSE: TENSOR}  # rows of both can be one tensor
_ROW = struct.Struct("<Q")  # the row; first, so that the rest is the same for all rows of a put
_COLUMN = struct.Struct("<c8sQQIQ")  # how, node, shard, its rows, ordinal, logical bytes
_FIXED = np.dtype(  # of a cell, its field left out
    {
        "names": ["row", "how", "node", "shard", "rows", "ordinal", "nbytes"],
        "formats": ["<u8", "S1", "V8", "<u8", "<u8", "<u4", "<u8"],
    }
)
_FIRST = _ROW.pack(0)
_SHARD_AT, _SHARD = _ROW.size + 1 + 8, struct.Struct("<Q")  # where a cell names its shard
_MOST = 1 << 48
_NO_CELL = "what TransferQueue's controller keeps of a row is no cell of this backend"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Field).decode


class StoredCells(NamedTuple):
    """A stored column: how its rows are returned (`entries`), and the parts of a reference to it."""

    how: bytes
    node: bytes
    shard: int
    rows: int
    ordinal: int
    nbytes: int
    field: Field


class ReadableRows(NamedTuple):
    """Rows that can be read together: the reference, and for each of its columns how its rows are returned and the
    positions of the requested rows (None: all, in order)."""

    ref: BatchRef
    how: dict[str, bytes]
    positions: npt.NDArray[np.int64] | None


Made = dict[str, list[bytes]]
"""Cells by field, one a row."""


def cells(ref: BatchRef, how: Mapping[str, bytes]) -> Made:
    """The cells of the rows of a put."""
    numbers = [_ROW.pack(row) for row in range(len(ref))]
    made = {}
    node, columns = described(ref)
    for name, field, nbytes, shard, ordinal in columns:
        column = _COLUMN.pack(how[name], node, shard, len(ref), ordinal, nbytes) + _encode(field)
        made[name] = [number + column for number in numbers]
    return made


def of_row(node: bytes, shard: int, columns: Sequence[tuple[str, Field, int]], how: Mapping[str, bytes]) -> Made:
    """The cells of one row that was put: the columns of its shard in their order, each with name, field and bytes."""
    listed = enumerate(columns)
    return {
        name: [_FIRST + _COLUMN.pack(how[name], node, shard, 1, ordinal, nbytes) + _encode(field)]
        for ordinal, (name, field, nbytes) in listed
    }


def retained(several: Sequence[bytes]) -> list[bytes]:
    """A second cell for each stored value; the value is freed when both cells were freed. Either all values get one or
    none does. Raises Freed, OwnerDied, Corrupt, LimitExceeded, PeerUnavailable."""
    by_node: defaultdict[bytes, list[int]] = defaultdict(list)
    wanted = []
    for at, cell in enumerate(several):
        stored = _stored(cell[_ROW.size :])
        (row,) = _ROW.unpack_from(cell)
        if row >= stored.rows:
            raise Corrupt("a cell names a row that its shard does not have")
        by_node[stored.node].append(at)
        wanted.append((stored.shard, stored.ordinal, row))
    found: list[bytes] = [b""] * len(several)
    try:
        for node, places in by_node.items():
            links = with_plane(partial(stored_rows.retain, node=node, rows=[wanted[at] for at in places]))
            for at, link in zip(places, links, strict=True):
                cell = several[at]
                found[at] = cell[:_SHARD_AT] + _SHARD.pack(link) + cell[_SHARD_AT + _SHARD.size :]
    except BaseException:
        drop({"": found})
        raise
    return found


def free(fields: Mapping[str, Sequence[bytes | None]]) -> None:
    """Free the values of these cells, which are given by field, one for each row. Values of a node that has ended are
    ignored. Raises PeerUnavailable, Corrupt."""
    for found in find(fields):
        with_plane(methodcaller("free", found.ref))


def drop(made: Mapping[str, Sequence[bytes | None]]) -> None:
    """As `free`, for the cells of a failed call: fields may differ in their numbers of rows; errors are ignored."""
    for name, own in made.items():
        if any(own):
            with suppress(DataplaneError):
                free({name: [cell or None for cell in own]})


def node(cell: bytes) -> bytes:
    """The node that stores the value. Raises Corrupt."""
    return _stored(cell[_ROW.size :]).node


def way(cell: bytes) -> bytes:
    """How the row is returned."""
    return cell[_ROW.size : _ROW.size + 1]


def given_back_as(cell: bytes, other: bytes) -> bytes:
    """The cell, with its row returned as that of the other."""
    return cell[: _ROW.size] + way(other) + cell[_ROW.size + 1 :]


def _stored(column: bytes) -> StoredCells:
    (stored,) = _all_stored([column])
    return stored


def _all_stored(columns: Sequence[bytes], numbered: Callable[[int], int] = int) -> list[StoredCells]:
    """The columns of these cells, without their rows; `numbered` maps the number of the shard or link in them."""
    try:
        fields = {each: _told_field(each) for each in {column[_COLUMN.size :] for column in columns}}
        unpack, end = _COLUMN.unpack_from, _COLUMN.size
        found = [
            StoredCells(how, node, numbered(shard), rows, ordinal, nbytes, fields[column[end:]])
            for column in columns
            for how, node, shard, rows, ordinal, nbytes in (unpack(column),)
        ]
    except struct.error as error:
        raise Corrupt(f"{_NO_CELL}: {error}") from error
    for how, _, _, rows, _, nbytes, _ in found:
        if how not in _WAYS or not 0 < rows < _MOST or nbytes >= 1 << 62:
            raise Corrupt(f"a cell of a column of {rows} rows and {nbytes} bytes, given back as {how!r}")
    return found


def _told_field(told: bytes) -> Field:
    try:
        return _field(told)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"{_NO_CELL}: {error}") from error


@lru_cache(maxsize=1 << 10)
def _field(told: bytes) -> Field:
    """The decoded field. There are as many columns as puts, but few distinct fields, so only fields are cached: a
    process that clears or reads for hours keeps nothing of freed columns."""
    field = _decode(told)
    check_field("", field)
    return field


def find(fields: Mapping[str, Sequence[bytes | None]], *, reading: bool = False) -> list[ReadableRows]:
    """The rows of the cells of each field, in as few references as possible; rows without a cell are left out.
    `reading`: by the shards of links, as they are read.

    Rows of one field that cannot be one column (text and dicts) are in several. Raises Corrupt.
    """
    alike: defaultdict[object, list[tuple[str, list[StoredCells], _Pattern]]] = defaultdict(list)
    singles: dict[str, _Singles] = {}
    for name, listed in fields.items():
        single = _singles(listed)
        if single is not None:
            singles[name] = single
            continue
        for stored, pattern in _classes(listed, reading):
            places = tuple([(each.node, each.rows) for each in stored])
            alike[pattern.key, places].append((name, stored, pattern))
    by_positions: defaultdict[bytes | None, list[ReadableRows]] = defaultdict(list)
    if singles:
        by_positions[None].append(_beside(singles, shard_of if reading else int))
    for several in alike.values():
        pattern = several[0][2]
        ref = _joined([(name, stored) for name, stored, _ in several], pattern)
        key = None if pattern.positions is None else pattern.positions.tobytes()
        how = {name: _how({each.how for each in stored}) for name, stored, _ in several}
        by_positions[key].append(ReadableRows(ref, how, pattern.positions))
    return [found for beside in by_positions.values() for found in _united(beside)]


class _Singles(NamedTuple):
    """Cells of one field, each from another put of one row: how they are returned, their field, and the numbers of
    each."""

    how: bytes
    field: Field
    table: npt.NDArray[Any]


def _singles(listed: Sequence[bytes | None]) -> _Singles | None:
    """The cells as `_Singles`, decoded together; None if one does not have that form."""
    first, end = listed[0], _FIXED.itemsize
    if first is None or None in listed or len(set(listed)) < len(listed):
        return None
    tails = {cell[end:] for cell in listed}  # type: ignore[index]  # none is None
    if len(tails) > 1:
        return None
    heads = b"".join([cell[:end] for cell in listed])  # type: ignore[index]
    if len(heads) != end * len(listed):
        return None
    table = np.frombuffer(heads, _FIXED)
    how = first[_ROW.size : _ROW.size + 1]
    alike = (table["how"] == how) & (table["row"] == 0) & (table["rows"] == 1) & (table["nbytes"] < 1 << 62)
    if not alike.all() or how not in _WAYS:
        return None
    return _Singles(how, _told_field(tails.pop()), table)


def _beside(singles: Mapping[str, _Singles], numbered: Callable[[int], int]) -> ReadableRows:
    """The rows of these fields. `numbered` as in `_all_stored`."""
    columns: list[tuple[str, Iterable[Field], Sequence[Cell]]] = []
    known: dict[bytes, list[ShardRef]] = {}
    for name, (_, field, table) in singles.items():
        nodes, numbers = table["node"], table["shard"]
        key = nodes.tobytes() + numbers.tobytes()
        if key not in known:
            shards = zip(nodes.tolist(), map(numbered, numbers.tolist()), strict=True)
            known[key] = [ShardRef(node, number, 1) for node, number in shards]
        cells = map(Cell, known[key], table["ordinal"].tolist(), table["nbytes"].tolist())
        columns.append((name, (field,), list(cells)))
    rows = len(columns[0][2])
    return ReadableRows(of_rows(columns, [0] * rows), {name: each.how for name, each in singles.items()}, None)


class _Pattern(NamedTuple):
    """How the rows of a column come from stored columns: for each stored column its rows, and then the order. `key`:
    equal for equal patterns; `single`: each stored column has one of the rows, in their order."""

    rows: Sequence[npt.NDArray[np.int64]]
    order: npt.NDArray[np.int64] | None
    positions: npt.NDArray[np.int64] | None
    key: object
    single: bool


def _classes(listed: Sequence[bytes | None], reading: bool) -> Iterable[tuple[list[StoredCells], _Pattern]]:
    """The rows of one field, divided into those that can be one column."""
    places = [place for place, cell in enumerate(listed) if cell is not None]
    present = [cell for cell in listed if cell is not None]
    try:
        rows = np.frombuffer(b"".join([cell[: _ROW.size] for cell in present]), "<i8")
    except ValueError:
        raise Corrupt(_NO_CELL) from None
    numbers: dict[bytes, int] = {}
    of = np.array([numbers.setdefault(cell[_ROW.size :], len(numbers)) for cell in present], np.int64)
    stored = _all_stored(list(numbers), shard_of if reading else int)
    if len(of) and ((rows < 0) | (rows >= np.array([each.rows for each in stored])[of])).any():
        raise Corrupt("a cell names a row that its shard does not have")
    kinds: dict[object, list[int]] = {}
    of_field: dict[tuple[bytes, int], list[int]] = {}
    for number, each in enumerate(stored):
        of_field.setdefault((each.how, id(each.field)), []).append(number)
    for several in of_field.values():
        each = stored[several[0]]
        kinds.setdefault((_CLASS.get(each.how, each.how), _kind(each.field)), []).extend(several)
    for chosen in map(sorted, kinds.values()):
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
    which = None if positions is None else positions.tobytes()
    if len(chosen) == len(of):  # numbers ascend as they are first met
        return _Pattern(rows.reshape(-1, 1), None, positions, ("single", rows.tobytes(), which), True)  # type: ignore[arg-type]  # an array is a sequence of its rows
    order = np.argsort(of, kind="stable")
    edges = np.searchsorted(of[order], [*chosen, chosen[-1] + 1])
    parts = np.split(rows[order], edges[1:-1])
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    in_order = bool((order[1:] > order[:-1]).all())
    turned = None if in_order else back
    key = tuple([part.tobytes() for part in parts]), None if turned is None else turned.tobytes(), which
    return _Pattern(parts, turned, positions, key, False)


def _how(several: set[bytes]) -> bytes:
    """How the rows of one column are returned, given the ways in which they were put."""
    return several.pop() if len(several) == 1 else TENSOR


def _kind(field: Field) -> object:
    """Equal for fields whose rows can be one column."""
    return field.kind, field.dtype, len(field.shape), tuple((name, _kind(child)) for name, child in field.children)


def _joined(columns: Sequence[tuple[str, list[StoredCells]]], pattern: _Pattern) -> BatchRef:
    """The columns, which have the same pattern, as one reference."""
    if pattern.single:
        fields = [{id(each.field): each.field for each in stored}.values() for _, stored in columns]
        beside = zip(columns, fields, strict=True)
        rows = np.concatenate(pattern.rows).tolist()
        return of_rows([(name, of, list(map(_cell, stored))) for (name, stored), of in beside], rows)
    parts = []
    for number, own in enumerate(pattern.rows):
        first = columns[0][1][number]
        told = [(name, s[number].field, s[number].nbytes, s[number].shard, s[number].ordinal) for name, s in columns]
        whole = ref_to(first.node, first.rows, told)
        parts.append(whole if _is_whole(own, first.rows) else whole[own])
    ref = concat(parts)
    return ref if pattern.order is None else ref[pattern.order]


def _cell(stored: StoredCells) -> Cell:
    return Cell(ShardRef(stored.node, stored.shard, stored.rows), stored.ordinal, stored.nbytes)


def _is_whole(rows: npt.NDArray[np.int64], of: int) -> bool:
    return len(rows) == of and bool((rows == np.arange(of)).all())


def _united(beside: Sequence[ReadableRows]) -> Iterable[ReadableRows]:
    """References to the same rows as one; those with the same field stay separate."""
    while beside:
        first, *others = beside
        apart = []
        for other in others:
            if first.how.keys() & other.how.keys():
                apart.append(other)
            else:
                first = ReadableRows(first.ref.union(other.ref), {**first.how, **other.how}, first.positions)
        yield first
        beside = apart
