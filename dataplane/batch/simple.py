"""Small columns of arrays and of lists of numbers, laid out at once as `batch.columns` plans them.

An agent's row is token ids in a list, log-probabilities in an array, a reward: what a plan makes of each (values,
buffers, a form) takes several times as long as all of their bytes. Columns whose names, types and sizes came before
have the layout that they had then.

Invariants: what is laid out here is, byte by byte, what a plan of the same columns is; whatever is not seen to
be simple is refused with None, and is the plan's.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from dataplane.batch import form
from dataplane.batch.dtypes import is_bits, name_of
from dataplane.batch.field import MAX_COLUMNS, MAX_NDIM, Field, is_text
from dataplane.batch.form import Form
from dataplane.batch.frame import Place
from dataplane.batch.infer import FLOATS, INTS, numbers_of
from dataplane.batch.layout import ALIGNMENT, Bytes

_PADDING = tuple([bytes(-over % ALIGNMENT) for over in range(ALIGNMENT)])  # behind so many bytes above a multiple


class Simple(NamedTuple):
    """Columns of `rows` rows each: the `nbytes` bytes of a shard in pieces, the caller's arrays where they can
    be; its layout; of each column name, field and bytes of values; where a reference to all of them has each; and how
    long the rows of those that have lengths are. `columns` and `named` are nobody's to change."""

    rows: int
    nbytes: int
    pieces: list[Any]
    layout: bytes
    columns: list[tuple[str, Field, int]]
    named: dict[str, Place]
    lengths: dict[str, bytes]

    @property
    def payload(self) -> bytes:
        """The bytes of the shard."""
        return b"".join(self.pieces)

    def write(self, memory: Bytes) -> None:
        """The same into memory of as many bytes."""
        np.concatenate([np.frombuffer(piece, np.uint8) for piece in self.pieces if len(piece)], out=memory)


class _Kind:
    """Columns of one field that lie in as many buffers."""

    __slots__ = ("field", "form")

    def __init__(self, field: Field, buffers: int) -> None:
        self.field = field
        self.form = Form(field, buffers)


class _Layout(NamedTuple):
    """The encoded layout, the bytes of all, and as in `Simple`. Remembered, and nobody's to change."""

    encoded: bytes
    nbytes: int
    columns: list[tuple[str, Field, int]]
    named: dict[str, Place]


_INTS, _FLOATS = _Kind(INTS, 2), _Kind(FLOATS, 2)


def laid_out(columns: Any, most: int) -> Simple | None:
    """The columns, whose shard has no more than `most` bytes; None where they are more, none, or not simple."""
    if type(columns) is not dict:
        return None
    pieces: list[Any] = []
    kinds: list[_Kind] = []
    sizes: list[int] = []
    lengths: dict[str, bytes] = {}
    rows = 0
    for name, values in columns.items():
        if type(values) is np.ndarray:
            kind = _dense(values.dtype, values.shape[1:]) if values.ndim and values.nbytes <= most else None
            count = len(values) if kind is not None else 0
            plain = count and values.flags.c_contiguous and values.dtype.kind in "biufc"  # what has a buffer
            data: Any = values if plain else values.tobytes() if count else b""
            size = values.nbytes if count else 0
        elif type(values) is list and 0 < len(values) <= most and all(type(row) is list for row in values):
            count, kind, data, size = len(values), None, b"", 0
            found = numbers_of(values) if 8 * sum(map(len, values)) <= most else None
            if found is not None:
                floats, data, offsets = found
                kind, size = _FLOATS if floats else _INTS, len(data)
                lengths[name] = offsets[8:] if count == 1 else np.diff(np.frombuffer(offsets, np.int64)).tobytes()
                pieces += (offsets, _PADDING[len(offsets) % ALIGNMENT])
        else:
            return None
        if kind is None or not size or (kinds and count != rows):
            return None
        rows = count
        pieces += (data, _PADDING[size % ALIGNMENT])
        kinds.append(kind)
        sizes.append(size)
    if not 0 < len(kinds) <= MAX_COLUMNS:
        return None
    laid = _layout(tuple(columns), tuple(kinds), rows, tuple(sizes))
    if laid is None or laid.nbytes > most:
        return None
    return Simple(rows, laid.nbytes, pieces, laid.encoded, laid.columns, laid.named, lengths)


@lru_cache(maxsize=1 << 10)
def _dense(dtype: np.dtype[Any], shape: tuple[int, ...]) -> _Kind | None:
    """The kind of an array's column; None for what NumPy has no numbers for."""
    name = name_of(dtype)
    if name is None or is_bits(name) or len(shape) > MAX_NDIM:
        return None
    return _Kind(Field("dense", name, shape), 1)


@lru_cache(maxsize=1 << 10)
def _layout(names: tuple[str, ...], kinds: tuple[_Kind, ...], rows: int, sizes: tuple[int, ...]) -> _Layout | None:
    """How columns lie one behind another; None where a name is none."""
    if not all(is_text(name) and name for name in names):
        return None
    numbers: list[int] = []
    base = 0
    for kind, size in zip(kinds, sizes, strict=True):
        numbers += (rows, rows)
        for nbytes in (8 * (rows + 1), size)[-kind.form.buffers :]:
            numbers += (base, nbytes)
            base += nbytes + len(_PADDING[nbytes % ALIGNMENT])
    return _Layout(
        form.join([(name, kind.form) for name, kind in zip(names, kinds, strict=True)], numbers),
        base,
        [(name, kind.field, size) for name, kind, size in zip(names, kinds, sizes, strict=True)],
        {name: Place(kind.field, 0, slot) for slot, (name, kind) in enumerate(zip(names, kinds, strict=True))},
    )
