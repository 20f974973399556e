from __future__ import annotations

import contextlib
import struct
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane.batch.object_codec import decode_row, encode_rows
from dataplane.batch.object_rows import LARGE
from dataplane.batch.rows import RowIndices
from dataplane.errors import Corrupt, SchemaMismatch
from tests.cases import each_case
from tests.unit.batch.exact import column, of_pieces, piece, same


@each_case(
    "value",
    [
        None, -(2**63), 2**64 - 1, float("nan"), -0.0, "", b"\x00", (), (1, (2, [3])),
        {1: "a", "b": (2,), None: 3, (1, 2): 4, 1.5: 5, b"x": 6}, np.float16(1.5), np.datetime64("2020", "D"),
        np.arange(6, dtype=">i4").reshape(2, 3), np.array(3.5), np.zeros((2, 0, 3), np.complex64),
        np.arange(6).reshape(2, 3).T, [np.ones(2), {"deep": np.bool_(True)}], torch.arange(6).view(2, 3).t(),
        torch.tensor([1.5, float("nan")], dtype=torch.bfloat16), torch.tensor(2.0, dtype=torch.float8_e4m3fn),
        np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3), np.array([-1, 7], ml_dtypes.int4),
        ml_dtypes.float8_e5m2(2),
        torch.zeros(0, 3), torch.tensor([1 + 2j]).conj(), torch.ones(2, requires_grad=True),
    ],
    ids=repr,
)  # fmt: skip
def test_object_values_round_trip_exactly(value: Any) -> None:
    [row] = encode_rows("x", [value])
    assert same(decode_row("x", row), value)


@each_case(
    "value",
    [
        memoryview(b"x"), print, (item for item in ()), threading.Lock(), object(), ...,
        torch.zeros(2).to_sparse(), np.zeros(2, np.longdouble), np.zeros(2, "i4,O"),
        np.ma.masked_array([1, 2], [0, 1]), np.zeros(2, np.dtypes.StringDType()),
    ],
)  # fmt: skip
def test_a_value_that_would_not_round_trip_is_refused(value: Any) -> None:
    with pytest.raises(SchemaMismatch) as caught:
        encode_rows("x", [None, [value]])
    error = caught.value
    assert (error.column, error.row) == ("x", 1)
    assert error.found
    assert error.found in str(error)
    assert str(error).rpartition(": ")[2]  # a way out


@given(st.data())
def test_a_value_with_wrong_bytes_is_corrupt_or_another_value(data: st.DataObject) -> None:
    [row] = encode_rows("x", [[np.arange(4), (1, {2: 3}), np.float32(1)]])
    raw = bytearray(row)
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(Corrupt):
        decode_row("x", bytes(raw))


_BIG = LARGE // 8


def large(seed: int) -> Any:
    return np.random.default_rng(seed).random(_BIG)


_PARTS = st.sampled_from([large(1), large(2), b"x" * LARGE, b"y" * LARGE, torch.ones(LARGE), 7, "a", None, np.ones(2)])
_VALUES = st.recursive(_PARTS, lambda inner: st.lists(inner, max_size=3) | st.tuples(inner), max_leaves=4)
_ROWS = st.lists(
    st.dictionaries(st.sampled_from("ab"), _VALUES, max_size=2) | st.just({}) | _VALUES, min_size=1, max_size=8
)


@given(_ROWS, st.data())
def test_object_rows_round_trip_when_selected_and_put_again(rows: list[Any], data: st.DataObject) -> None:
    found = column([*rows, None])  # None: objects, whatever the others are
    rows = [*rows, None]
    assert same(found.to_list(), rows)
    picks = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6))
    one = piece("x", rows, RowIndices.index(np.array(picks, np.int64)))
    picked = of_pieces("x", one.layout.field, [one])
    wanted = [rows[i] for i in picks]
    assert same(picked.to_list(), wanted)
    for again in (picked, picked.arrow()):
        if wanted:
            assert same(column(again).to_list() if again is picked else _of(again), wanted)
    assert same(column(found, dedupe=True).to_list(), rows)
    both = column([{"a": row} for row in rows], dedupe=True)
    assert same(both.to_list(), [{"a": row} for row in rows])


def test_large_bytes_of_one_object_row_do_not_appear_in_another() -> None:
    """Rows are decoded one after another, each in memory that the next one may get."""
    rows = [(bytes([row]) * LARGE,) if row < 4 else None for row in range(12)]
    assert column(rows).to_list() == rows


def _of(array: pa.Array) -> list[Any]:
    return [decode_row("x", row.as_buffer()) for row in array]


def _row(numbers: list[int], rest: bytes, count: int | None = None) -> bytes:
    head = struct.pack("<BxxxI", 0xC1, len(numbers) if count is None else count)
    return head + np.array(numbers, np.int64).tobytes() + rest


@each_case(
    "row",
    [
        b"\xc1",
        b"",
        _row([], b""),
        _row([], b"\xc0", count=1),
        _row([], b"\xc0", count=(1 << 32) - 1),
        _row([5], b"\xc0"),
        _row([1 << 62], b"\xc0"),
        _row([-1], b"\xc0"),
        _row([-(1 << 63)], b"\xc0"),
        _row([0], b"\xc7\x01\x0a\x01"),  # bytes that are part 1 of one
        _row([0], b"\xc7\x01\x0a\xff"),
    ],
)
def test_an_object_row_with_invalid_parts_is_corrupt(row: bytes) -> None:
    with pytest.raises(Corrupt):
        decode_row("x", row)
