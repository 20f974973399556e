"""Columns that came one by one, joined: the rows come out as they would by themselves."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import given

from dataplane.batch.columns import values_of
from dataplane.batch.joining import joined, owned
from tests.unit.batch.exact import column, same

_INTS = st.lists(st.integers(-9, 9), max_size=4)
_KINDS: list[st.SearchStrategy[list[Any]]] = [
    st.lists(_INTS.filter(len), min_size=1, max_size=3),
    st.lists(st.text("abcé", max_size=3), min_size=1, max_size=3),
    st.lists(st.binary(max_size=3), min_size=1, max_size=3),
    st.lists(st.floats(allow_nan=False), min_size=1, max_size=3),
    st.lists(st.fixed_dictionaries({"a": st.integers(0, 9)}, optional={}), min_size=1, max_size=3),
    st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 3))), min_size=1, max_size=3),
]


@given(st.one_of(*[st.lists(kind, min_size=1, max_size=5) for kind in _KINDS]))
def test_rows_of_columns_that_are_joined_are_those_of_each(several: list[list[Any]]) -> None:
    values = [owned(values_of("x", rows)) for rows in several]
    if any(each.index is not None or each.field != values[0].field for each in values):
        return
    assert same(column(joined(values)).to_list(), [row for rows in several for row in rows])
