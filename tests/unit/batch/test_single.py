"""A row that is laid out at once is, byte by byte, what a plan of it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataplane.batch import objects
from dataplane.batch.columns import plan
from dataplane.batch.single import LARGE, Row, Single, laid_out, single
from tests.cases import each_case
from tests.unit.batch.exact import filled

_DTYPES = (torch.int64, torch.float32, torch.uint8, torch.bool, torch.complex64)
_shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)
_tensors = st.builds(lambda shape, dtype: torch.ones(shape).to(dtype), _shapes, st.sampled_from(_DTYPES))
_plain = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.text() | st.floats(allow_nan=False)
_objects = st.recursive(_plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
_columns = st.dictionaries(
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


@given(_columns)
def test_a_row_lies_as_a_plan_of_it(columns: dict[str, tuple[Any, bool]]) -> None:
    found = {name: one for name, one in singles(columns).items() if one is not None}
    refused = [value for name, (value, _) in columns.items() if name not in found]
    assert all(isinstance(value, str) and not value.isascii() for value in refused)
    if not found:
        return
    row = laid_out(list(found.items()))
    assert row is not None
    given = {}
    for name in found:
        value, as_object = columns[name]
        scalar = isinstance(value, torch.Tensor) and not value.ndim
        given[name] = objects.values_of(name, [value]) if as_object else value[None] if scalar else [value]
    assert row == Row(*planned(given))


_LEFT = [
    torch.empty(3, 0), torch.zeros(LARGE + 1, dtype=torch.uint8), torch.ones(2, requires_grad=True), np.ones(3),
    torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2).to_sparse(),
]  # fmt: skip


@each_case("value", _LEFT, ids=str)
def test_what_is_not_simple_is_the_plans(value: Any) -> None:
    assert single("x", [value], as_object=False) is None
