"""Simple columns, laid out at once: the bytes and the layout of a plan, or left to it."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from dataplane.batch import infer
from dataplane.batch.columns import plan
from dataplane.batch.field import MAX_COLUMNS
from dataplane.batch.simple import laid_out
from tests.cases import each_case

_DTYPES = ["<f4", ">f4", "<i8", "u1", "?", "<c8", "<f2", "<M8[us]"]
_MOST = 64 << 10


def _column(rows: int) -> st.SearchStrategy[Any]:
    shapes = st.lists(st.integers(1, 3), max_size=2).map(lambda shape: (rows, *shape))
    arrays = st.tuples(st.sampled_from(_DTYPES), shapes).map(lambda each: np.ones(each[1], each[0]))
    ints = st.lists(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=9), min_size=rows, max_size=rows)
    floats = st.lists(st.lists(st.floats(), max_size=9), min_size=rows, max_size=rows)
    return st.one_of(arrays, arrays.map(lambda array: array[:, ::-1] if array.ndim > 1 else array), ints, floats)


@given(st.integers(1, 4).flatmap(lambda rows: st.dictionaries(st.text("abc", min_size=1), _column(rows), min_size=1)))
def test_it_is_what_a_plan_makes(columns: dict[str, Any]) -> None:
    laid = laid_out(columns, _MOST)
    if laid is None:  # a list without any number, or no extension
        assert infer._read is None or any(isinstance(v, list) and not any(v) for v in columns.values())
        return
    planned = plan(columns)
    memory = np.full(planned.nbytes, 0xFF, np.uint8)
    for job in planned.jobs(memory):
        job()
    assert laid.payload == memory.tobytes()
    written = np.full(laid.nbytes, 0xEE, np.uint8)
    laid.write(written)
    assert written.tobytes() == laid.payload
    assert laid.layout == planned.layout().encode()
    assert laid.rows == planned.rows
    assert laid.columns == [(c.name, c.field, c.logical_nbytes) for c in planned.columns]
    assert laid.lengths == {c.name: c.lengths.tobytes() for c in planned.columns if c.lengths is not None}


_LEFT = [
    {"x": [[]]}, {"x": [[1], (2,)]}, {"x": [[1, 2.0]]}, {"x": [[True]]}, {"x": [[1 << 64]]}, {"": np.ones(1)},
    {"x": np.ma.masked_array([1, 2])}, {"x": np.ones(1, np.longdouble)}, {"x": np.ones(2), "y": np.ones(3)}, None,
    {"x": np.ones(_MOST)}, {str(i): np.ones(1) for i in range(MAX_COLUMNS + 1)},
]  # fmt: skip


@each_case("columns", _LEFT)
def test_what_is_not_simple_is_left(columns: Any) -> None:
    assert laid_out(columns, _MOST) is None
