"""Rows that came one by one, joined or written into one memory."""

from __future__ import annotations

import sys
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from dataplane.batch import _lists
from dataplane.batch.put_plan import columns_of, values_of
from dataplane.batch.row_batcher import RowMemory, joined, owned
from tests.cases import each_case
from tests.unit.batch.exact import column, same

_LISTS = st.lists(st.integers(-9, 9), max_size=4)
_KINDS: list[st.SearchStrategy[list[Any]]] = [
    st.lists(_LISTS.filter(len), min_size=1, max_size=3),
    st.lists(st.text("abcé", max_size=3), min_size=1, max_size=3),
    st.lists(st.binary(max_size=3), min_size=1, max_size=3),
    st.lists(st.floats(allow_nan=False), min_size=1, max_size=3),
    st.lists(st.fixed_dictionaries({"a": st.integers(0, 9)}, optional={}), min_size=1, max_size=3),
    st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 3))), min_size=1, max_size=3),
]


@given(st.one_of(*[st.lists(kind, min_size=1, max_size=5) for kind in _KINDS]))
def test_joined_columns_have_the_rows_of_their_parts(several: list[list[Any]]) -> None:
    values = [owned(values_of("x", rows)) for rows in several]
    if any(each.index is not None or each.field != values[0].field for each in values):
        return
    assert same(column(joined(values)).to_list(), [row for rows in several for row in rows])


_INTS = st.integers(-(1 << 63), (1 << 63) - 1)


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.integers(1, 3))
    ids = draw(st.lists(st.lists(_INTS, max_size=5), min_size=count, max_size=count))
    logp = draw(st.lists(st.lists(st.floats(), min_size=1, max_size=5), min_size=count, max_size=count))
    array = np.array(draw(st.lists(_INTS, min_size=4 * count, max_size=4 * count)), np.int64).reshape(count, 2, 2)
    return {"ids": ids, "logp": logp, "array": array[:, ::-1] if draw(st.booleans()) else array}


def of(columns: dict[str, Any]) -> RowMemory:
    gathered = RowMemory.of([(name, values.field) for name, values in columns_of(columns)])
    assert gathered is not None
    return gathered


def listed(gathered: RowMemory, start: int, stop: int) -> dict[str, list[Any]]:
    return {name: column(values).to_list() for name, values in gathered.columns(start, stop).items()}


_ONE = {"ids": [[1, 2]], "logp": [[0.5]], "array": np.zeros((1, 2, 2), np.int64)}


@given(st.lists(rows(), min_size=1, max_size=8), st.data())
def test_batched_rows_round_trip(several: list[dict[str, Any]], data: st.DataObject) -> None:
    gathered = of(_ONE)
    counts = [gathered.take(each, sys.maxsize) for each in several]
    assert counts == [len(each["ids"]) for each in several]
    ends = np.cumsum([0, *counts]).tolist()
    first = data.draw(st.integers(0, len(several) - 1))
    last = data.draw(st.integers(first + 1, len(several)))
    expected = {
        name: [row for each in several[first:last] for row in np.asarray(each[name]).tolist()]
        if name == "array"
        else [row for each in several[first:last] for row in each[name]]
        for name in _ONE
    }
    found = listed(gathered, ends[first], ends[last])
    assert found["array"] == expected["array"]
    assert same(found["ids"], expected["ids"])
    assert same(found["logp"], expected["logp"])


@each_case(
    "other",
    [
        {**_ONE, "ids": [[1, 2.0]]}, {**_ONE, "ids": [[True]]}, {**_ONE, "ids": [(1,)]}, {**_ONE, "ids": []},
        {**_ONE, "ids": [[1], [2]]}, {**_ONE, "ids": [[1 << 64]]}, {**_ONE, "logp": [[1]]},
        {**_ONE, "array": np.zeros((1, 2, 2), np.int32)},
        {**_ONE, "array": np.zeros((1, 2, 3), np.int64)}, {**_ONE, "array": np.zeros((0, 2, 2), np.int64)},
        {**_ONE, "array": [[0]]}, {"ids": [[1]], "logp": [[0.5]]}, {**_ONE, "more": np.zeros(1)},
        dict(reversed(_ONE.items())), None,
    ],
)  # fmt: skip
def test_dissimilar_rows_are_refused_and_leave_the_batcher_unchanged(other: Any) -> None:
    gathered = of(_ONE)
    assert gathered.take(_ONE, sys.maxsize) == 1
    before = gathered.nbytes
    assert gathered.take(other, sys.maxsize) == 0
    assert gathered.take(_ONE, before - 1) == 0
    assert (gathered.rows, gathered.nbytes) == (1, before)
    assert gathered.take(_ONE, before) == 1
    assert listed(gathered, 0, 2)["ids"] == [[1, 2], [1, 2]]


@each_case(("at", "error"), [(-1, ValueError), (17, ValueError), (9, None), (8, None)])
def test_the_extension_writes_within_the_memory_and_nowhere_else(at: int, error: type[Exception] | None) -> None:
    memory = bytearray(b"\xaa" * 16)
    if error is not None:
        with pytest.raises(error):
            _lists.write([[1]], memory, at, False)
        with pytest.raises(error):
            _lists.copy(np.ones(1, np.int64), memory, at)
    elif at == 9:  # seven bytes are left
        assert _lists.write([[1]], memory, at, False) is None
        with pytest.raises(ValueError, match="not in the memory"):
            _lists.copy(np.ones(1, np.int64), memory, at)
    else:
        assert _lists.write([[1], []], memory, at, False) == (1, 0)
    assert memory[:8] == b"\xaa" * 8
    assert (memory[8:] == b"\xaa" * 8) == (at != 8)
