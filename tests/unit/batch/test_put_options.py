"""Integers stored in the narrowest dtype that holds them, and read in the one that they were given in."""

from __future__ import annotations

from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from dataplane.batch.batch import Column, StoredPiece
from dataplane.batch.dtypes import INTEGERS, storage
from dataplane.batch.field import Field
from dataplane.batch.put_options import narrowed
from dataplane.batch.rows import RowIndices
from tests.unit.batch.exact import piece, same

WIDTHS = st.sampled_from([*INTEGERS, ">i4", ">u8", ">i2"])
SHAPES = st.sampled_from([(), (3,), (2, 2), (0,)])


def stored(values: Any, rows: RowIndices | None = None, *, dedupe: bool = False, name: str = "x") -> StoredPiece:
    return piece(name, narrowed({name: values}, True)[name], rows, dedupe=dedupe)


def column(*pieces: StoredPiece, order: Any = None) -> Column:
    return Column("x", pieces[0].layout.field.declared, pieces, order)


def fewest(values: Any, wide: np.dtype[Any]) -> int:
    """The bytes of the narrowest integer that holds all of them."""
    found = [v for array in values for v in np.asarray(array).reshape(-1).tolist()]
    low, high = min(found, default=0), max(found, default=0)
    names = [n for n in INTEGERS if np.iinfo(n).min <= low and high <= np.iinfo(n).max]
    return min(wide.itemsize, *(np.dtype(name).itemsize for name in names))


@st.composite
def blocks(draw: Any) -> list[list[np.ndarray[Any, Any]]]:
    """Rows of a column in a few blocks, with values of a range of each block's own."""
    dtype, shape = np.dtype(draw(WIDTHS)), draw(SHAPES)
    info, found = np.iinfo(dtype), []
    for _ in range(draw(st.integers(1, 3))):
        most = draw(st.sampled_from([0, 1, 7, 8, 15, 16, 31, 32, 63, 64]))
        low = max(info.min, draw(st.sampled_from([0, -(1 << most) // 2])))
        bounded = st.integers(low, max(low, min(info.max, (1 << most) - 1)))
        lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
        found.append([draw(hnp.arrays(dtype, (n, *shape), elements=bounded)) for n in lengths])
    return found


@given(blocks(), st.booleans(), st.data())
def test_narrowed_integers_round_trip_in_their_declared_dtype(given_: Any, dedupe: bool, data: Any) -> None:
    pieces = [stored(block, dedupe=dedupe) for block in given_]
    rows = [row for block in given_ for row in block]
    order = np.array(data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9)), np.int64)
    whole = Column("x", Field("ragged", pieces[0].layout.field.declared.dtype, (None, *rows[0].shape[1:])), pieces)
    picked = Column("x", whole.field, pieces, order)
    for found, expected in ((whole, rows), (picked, [rows[at] for at in order.tolist()])):
        assert same(list(found.numpy()), expected)
        assert found.to_list() == [row.tolist() for row in expected]
        np.testing.assert_array_equal(found.lengths(), [len(row) for row in expected])
        for narrow, row in zip(found.narrow().numpy(), expected, strict=True):
            np.testing.assert_array_equal(narrow, row)
            assert narrow.dtype.itemsize <= row.dtype.itemsize
    for stored_, block in zip(pieces, given_, strict=True):
        assert storage(stored_.layout.field.dtype).itemsize == fewest(block, rows[0].dtype)


def test_only_the_integers_of_a_struct_are_narrowed() -> None:
    rows = [{"ids": [1, 2], "logprobs": [0.5, 1.0]}, {"logprobs": [2.0]}, {"ids": [70_000], "logprobs": []}]
    piece = stored(rows)
    assert dict(piece.layout.field.children)["ids"].dtype == "int64:int32"
    assert dict(piece.layout.field.children)["logprobs"].dtype == "float64"
    assert column(piece).to_list() == rows
    assert same(column(piece).narrow().numpy()[0]["ids"], np.array([1, 2], np.int32))
