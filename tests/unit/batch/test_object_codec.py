from __future__ import annotations

import contextlib
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane.batch.object_codec import decode_row, encode_rows
from dataplane.errors import Corrupt, SchemaMismatch
from tests.cases import each_case
from tests.unit.batch.exact import same


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
