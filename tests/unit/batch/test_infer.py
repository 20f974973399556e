from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane.batch import infer
from dataplane.batch.dtypes import BITS, decoded, storage
from dataplane.batch.put_plan import values_of
from dataplane.batch.values import Values
from dataplane.errors import SchemaMismatch
from tests.cases import each_case
from tests.unit.batch.exact import column, same

_PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(width=64)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text("abcé", max_size=3), inner, max_size=3)
        | st.dictionaries(
            st.integers(0, 9) | st.booleans() | st.none() | st.tuples(st.integers(0, 3)), inner, max_size=3
        )
    ),
    max_leaves=12,
)


@given(st.lists(_PLAIN, max_size=6))
def test_plain_values_round_trip_equal_and_mixed_values_exactly(rows: list[Any]) -> None:
    found = column(rows)
    back = found.to_list()
    if found.kind in ("object", "text", "bytes"):
        assert same(back, rows)
    else:
        assert repr(back) == repr(rows) or back == rows  # ints among floats are equal; repr is for NaN


@each_case(
    ("rows", "kind", "dtype", "shape"),
    [
        (["a", "", "ü"], "text", "", ()), ([np.str_("a"), "b"], "text", "", ()),
        ([b"a", bytearray(b"b"), memoryview(b"c")], "bytes", "", ()), ([True, False], "dense", "bool", ()),
        ([1, -2], "dense", "int64", ()), ([1, 2**63], "dense", "uint64", ()), ([-1, 2**63], "object", "", ()),
        ([1, 2.5], "dense", "float64", ()), ([2**53 + 1, 2.5], "object", "", ()),
        ([2**63, 0.5], "dense", "float64", ()), ([1, True], "object", "", ()),
        ([1j, 2 + 0j], "dense", "complex128", ()), ([np.float32(1), np.float32(2)], "dense", "float32", ()),
        ([np.float32(1), np.float64(2)], "object", "", ()),
        ([np.array(1, np.int16), np.array(2, np.int16)], "dense", "int16", ()),
        ([torch.tensor(1.0), torch.tensor(2.0)], "dense", "float32", ()),
        ([np.zeros(3), np.zeros(3)], "ragged", "float64", (None,)),
        ([np.zeros((3, 2)), np.zeros((1, 2))], "ragged", "float64", (None, 2)),
        ([np.zeros((3, 4, 2)), np.zeros((3, 5, 2))], "ragged", "float64", (None, None, 2)),
        ([torch.zeros(3, 2), torch.zeros(3, 2)], "ragged", "float32", (None, 2)),
        ([torch.zeros(2), np.zeros(3, np.float32)], "ragged", "float32", (None,)),
        ([np.zeros(2, np.float32), torch.zeros(3)], "ragged", "float32", (None,)),
        ([[1, 2], []], "ragged", "int64", (None,)), ([[], []], "ragged", "null", (None,)),
        ([[[], []], []], "ragged", "int64", (None, 0)), ([[1, 2.5], [3]], "ragged", "float64", (None,)),
        ([[True], []], "ragged", "bool", (None,)), ([[np.int32(1)], [np.int32(2)]], "ragged", "int32", (None,)),
        ([[[1, 2], [3, 4]], []], "ragged", "int64", (None, 2)), ([[[1, 2], [3]], []], "object", "", ()),
        ([[1, [2]], [3]], "object", "", ()), ([["a"], ["b"]], "object", "", ()),
        ([(1, 2), (3, 4)], "object", "", ()), ([None, None], "object", "", ()),
        ([None, np.zeros(2)], "object", "", ()), ([], "object", "", ()), ([{}, {}], "struct", "", ()),
        ([{1: 2}], "object", "", ()), ([{"a": 1}, None], "object", "", ()),
        ([np.array(["a", "b"], object), np.array([], object)], "object", "", ()),
        ([np.array([b"a"], "S10"), np.array([b"ab"], "S10")], "object", "", ()),
        ([np.array("a"), np.array("b")], "object", "", ()),
        ([np.zeros(2, "i4,f4"), np.zeros(2, "i4,f4")], "object", "", ()),
        ([np.zeros(2), np.zeros(2, np.float32)], "object", "", ()),
        ([np.zeros(2), np.zeros((2, 2))], "object", "", ()),
        ([torch.zeros(2), torch.zeros(2, dtype=torch.int32)], "object", "", ()),
        ([torch.zeros(2), torch.tensor(1.0)], "object", "", ()),
        ([torch.zeros(2), np.zeros(2)], "object", "", ()),
        ([np.array(["a"]), torch.zeros(2)], "object", "", ()), ([1, 2**64], "object", "", ()),
        ([{1, 2}], "object", "", ()),
    ],
)  # fmt: skip
def test_the_kind_follows_from_the_types(rows: list[Any], kind: str, dtype: str, shape: tuple[Any, ...]) -> None:
    field = values_of("x", rows).field
    assert (field.kind, field.dtype, field.shape) == (kind, dtype, shape)
    if kind == "object":
        assert same(column(rows).to_list(), rows)


@each_case(
    ("rows", "row", "found"),
    [
        (["a", "\ud800"], 1, "surrogate"),
        ([None, "\ud800"], 1, "surrogate"),
        ([{"a": 1}, {"\ud800": 1}], 1, "surrogate"),
        ([None, [object()]], 1, "object"),
        ([None, np.longdouble(1)], 1, "NumPy"),
        ([np.zeros(2), np.zeros(2, np.longdouble)], 1, "NumPy"),
        ([np.ma.masked_array([1, 2], [0, 1])], 0, "masked"),
        ([torch.tensor([1, 2]), np.ma.masked_array([1, 2], [0, 1])], 1, "masked"),
    ],
)
def test_a_value_that_cannot_be_held_is_named(rows: list[Any], row: int, found: str) -> None:
    with pytest.raises(SchemaMismatch) as caught:
        values_of("answers", rows)
    error = caught.value
    assert error.column == "answers"
    assert error.row == row
    assert found in error.found
    assert error.expected
    assert f"row {row}" in str(error)


def test_a_list_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(SchemaMismatch, match="nested"):
        values_of("x", [None, loop])
    with pytest.raises(SchemaMismatch, match="nested"):
        values_of("x", [loop])


# Lists of numbers, read by the extension or, where it declines, as other lists

_NUMBERS = st.one_of(
    st.lists(st.lists(st.integers(-(1 << 63), (1 << 63) - 1)), min_size=1),
    st.lists(st.lists(st.floats()), min_size=1),
    st.lists(
        st.lists(st.one_of(st.integers(-(1 << 65), 1 << 65), st.floats(), st.booleans(), st.text(max_size=2))),
        min_size=1,
    ),
)


@given(_NUMBERS)
def test_lists_of_numbers_are_the_same_by_the_extension_and_as_other_lists(rows: list[list[Any]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        ours = infer.infer("x", rows)
        patch.setattr(infer, "numbers_of", lambda rows: None)
        plain = infer.infer("x", rows)
    assert ours.field == plain.field
    assert ours.nbytes == plain.nbytes
    assert np.array_equal(ours.offsets, plain.offsets)
    assert _bytes(ours) == _bytes(plain)


def _bytes(values: Values) -> bytes:
    assert values.data is not None
    memory = np.zeros(values.data.nbytes, np.uint8)
    for job in values.data.jobs(memory, 1 << 20):
        job()
    return memory.tobytes()


@given(st.text(max_size=12))
def test_any_name_gives_a_dtype_of_numbers_or_is_refused(name: str) -> None:
    try:
        dtype = storage(name)
    except ValueError:
        return
    assert dtype.kind in "biufcmM"


@each_case("name", [name for name in BITS if name != "float4_e2m1fn_x2" and hasattr(torch, name)])
def test_decoded_bits_agree_with_torch(name: str) -> None:
    count = {1: 256, 2: 1 << 16, 4: 1 << 16}[storage(name).itemsize]
    codes = np.arange(count, dtype=np.int64) * (1 if count == 256 or storage(name).itemsize == 2 else 65537)
    codes = codes.astype(storage(name))
    tensor = torch.from_numpy(codes.view(f"i{codes.itemsize}")).view(getattr(torch, name))
    wide = tensor.to(torch.complex64 if name == "complex32" else torch.float64).numpy()
    np.testing.assert_array_equal(decoded(name, codes), wide)
