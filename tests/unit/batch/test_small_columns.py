"""SmallColumns columns, laid out at once: the bytes and the layout of a plan, or left to it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import hypothesis.extra.numpy as hnp
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane.batch import object_codec
from dataplane.batch.batch import Column
from dataplane.batch.dtypes import INTEGERS, storage
from dataplane.batch.field import MAX_COLUMNS, Field
from dataplane.batch.layout import aligned_bytes, check_contents
from dataplane.batch.layout_check import check_layout
from dataplane.batch.put_options import narrowed
from dataplane.batch.put_plan import plan
from dataplane.batch.rows import RowIndices
from dataplane.batch.small_columns import LARGE, Single, laid_out, laid_out_row, single
from dataplane.batch.stored_column import StoredPiece
from tests.cases import each_case
from tests.unit.batch.exact import filled, of_pieces, piece, same

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
    if laid is None:  # a list without any number
        assert any(isinstance(v, list) and not any(v) for v in columns.values())
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


ROWS = 250
_MIXED: dict[str, Any] = {
    "dense": np.arange(4.0 * ROWS).reshape(ROWS, 4),
    "strided": np.arange(8 * ROWS).reshape(ROWS, 8)[:, ::2],
    "tensor": torch.arange(4 * ROWS).view(4, ROWS).t(),
    "ragged": [np.arange(i % 17) for i in range(ROWS)],
    "tensors": [torch.ones(i % 5, 3) * i for i in range(ROWS)],
    "images": [np.full((i % 3, 2, i % 4), i) for i in range(ROWS)],
    "text": [f"answer {i}" for i in range(ROWS)],
    "bytes": [b"x" * (i % 2000) for i in range(ROWS)],
    "object": [None if i % 2 else i for i in range(ROWS)],
    "struct": [{"a": i} if i % 3 else {"b": [i] * (i % 4)} for i in range(ROWS)],
    "twice": [f"prompt {i // 8}" for i in range(ROWS)],
}


@each_case("piece", [1, 100, 4096, 1 << 30])
def test_jobs_write_every_byte_in_any_order_and_in_threads(piece: int) -> None:
    planned = plan(_MIXED, dedupe=["twice"])
    results = []
    for fill in (0, 255):
        memory = aligned_bytes(planned.nbytes)
        memory[:] = fill
        jobs = planned.jobs(memory, piece)
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(job) for job in jobs[::-1]]:
                done.result()
        results.append(memory)
    assert bool((results[0] == results[1]).all())
    layout = planned.layout()
    check_layout(layout.encode(), planned.nbytes)
    check_contents(layout, results[0])


# Integers stored in the narrowest dtype that holds them, and read in the one that they were given in.

WIDTHS = st.sampled_from([*INTEGERS, ">i4", ">u8", ">i2"])
SHAPES = st.sampled_from([(), (3,), (2, 2), (0,)])


def stored(values: Any, rows: RowIndices | None = None, *, dedupe: bool = False, name: str = "x") -> StoredPiece:
    return piece(name, narrowed({name: values}, True)[name], rows, dedupe=dedupe)


def column(*pieces: StoredPiece, order: Any = None) -> Column:
    return of_pieces("x", pieces[0].layout.field.declared, pieces, order)


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
    whole = of_pieces("x", Field("ragged", pieces[0].layout.field.declared.dtype, (None, *rows[0].shape[1:])), pieces)
    picked = of_pieces("x", whole.field, pieces, order)
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
