"""SmallColumns columns, laid out at once: the bytes and the layout of a plan, or left to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane.batch import infer, object_codec
from dataplane.batch.field import MAX_COLUMNS
from dataplane.batch.put_plan import plan
from dataplane.batch.small_columns import LARGE, Single, laid_out, laid_out_row, single
from tests.cases import each_case
from tests.unit.batch.exact import filled

_DTYPES = ["<f4", ">f4", "<i8", "u1", "?", "<c8", "<f2", "<M8[us]"]
_MOST = 64 << 10


def _column(rows: int) -> st.SearchStrategy[Any]:
    shapes = st.lists(st.integers(1, 3), max_size=2).map(lambda shape: (rows, *shape))
    arrays = st.tuples(st.sampled_from(_DTYPES), shapes).map(lambda each: np.ones(each[1], each[0]))
    ints = st.lists(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=9), min_size=rows, max_size=rows)
    floats = st.lists(st.lists(st.floats(), max_size=9), min_size=rows, max_size=rows)
    return st.one_of(arrays, arrays.map(lambda array: array[:, ::-1] if array.ndim > 1 else array), ints, floats)


@given(st.integers(1, 4).flatmap(lambda rows: st.dictionaries(st.text("abc", min_size=1), _column(rows), min_size=1)))
def test_small_columns_have_the_layout_and_bytes_of_a_put_plan(columns: dict[str, Any]) -> None:
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
def test_complex_columns_are_left_to_the_put_plan(columns: Any) -> None:
    assert laid_out(columns, _MOST) is None


_TENSOR_DTYPES = (torch.int64, torch.float32, torch.uint8, torch.bool, torch.complex64)
_shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)
_tensors = st.builds(lambda shape, dtype: torch.ones(shape).to(dtype), _shapes, st.sampled_from(_TENSOR_DTYPES))
_plain = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.text() | st.floats(allow_nan=False)
_objects = st.recursive(_plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
_rows_of_one = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.tuples(_objects, st.just(True)) | st.tuples(_tensors | st.text("aé") | st.binary(max_size=200), st.just(False)),
    min_size=1,
    max_size=6,
)


def planned(columns: dict[str, Any]) -> tuple[bytes, bytes, list[Any]]:
    """The bytes, the layout, and what is known of each column, by a plan."""
    found = plan(columns)
    memory = filled(found)
    described = [(column.name, column.field, column.logical_nbytes) for column in found.columns]
    return memory.tobytes(), found.layout().encode(), described


def singles(columns: dict[str, tuple[Any, bool]]) -> dict[str, Single | None]:
    return {
        name: single(name, [value], as_object=as_object)
        if as_object or not isinstance(value, torch.Tensor) or value.ndim
        else single(name, value[None], as_object=False)
        for name, (value, as_object) in columns.items()
    }


@given(_rows_of_one)
def test_a_small_row_has_the_layout_and_bytes_of_a_put_plan(columns: dict[str, tuple[Any, bool]]) -> None:
    found = {name: one for name, one in singles(columns).items() if one is not None}
    refused = [value for name, (value, _) in columns.items() if name not in found]
    assert all(isinstance(value, str) and not value.isascii() for value in refused)
    if not found:
        return
    row = laid_out_row(list(found.items()))
    assert row is not None
    given = {}
    for name in found:
        value, as_object = columns[name]
        scalar = isinstance(value, torch.Tensor) and not value.ndim
        given[name] = object_codec.values_of(name, [value]) if as_object else value[None] if scalar else [value]
    assert (row.payload, row.layout, row.columns) == planned(given)
    assert row.nbytes == len(row.payload)


_NO_SINGLE = [
    torch.empty(3, 0), torch.zeros(LARGE + 1, dtype=torch.uint8), torch.ones(2, requires_grad=True), np.ones(3),
    torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2).to_sparse(),
]  # fmt: skip


@each_case("value", _NO_SINGLE, ids=str)
def test_a_complex_value_is_left_to_the_put_plan(value: Any) -> None:
    assert single("x", [value], as_object=False) is None
