from __future__ import annotations

from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from dataplane.batch import _memory, dedupe, values
from dataplane.batch.put_plan import plan, values_of
from tests.cases import each_case
from tests.unit.batch.exact import column, same

_ROW = np.arange(6.0)


def _stored(values: Any) -> int:
    planned = plan({"x": values}, dedupe=["x"])
    assert planned.layout().columns[0][1].indexed
    return planned.columns[0].values.rows


@each_case(
    ("values", "stored"),
    [
        pytest.param(np.repeat(np.arange(12).reshape(4, 3), 5, axis=0), 4, id="dense"),
        pytest.param(np.broadcast_to(_ROW, (9, 6)), 1, id="broadcast"),
        pytest.param(np.repeat(np.arange(12).reshape(4, 3), 5, axis=0)[:, ::2], 4, id="strided"),
        pytest.param(torch.zeros(7, 3).t().contiguous().t(), 1, id="strided tensor"),
        pytest.param(torch.ones(3).expand(5, 3), 1, id="expanded tensor"),
        pytest.param([_ROW, _ROW.copy(), _ROW[::-1], _ROW], 2, id="ragged"),
        pytest.param([np.zeros((2, 3)), np.zeros((3, 2)), np.zeros((2, 3))], 2, id="equal bytes, other shape"),
        pytest.param([torch.zeros(2), torch.ones(2), torch.zeros(2)], 2, id="tensors"),
        pytest.param(["a", "b", "a"], 2, id="text"),
        pytest.param([b"a", b"b", b"a"], 2, id="bytes"),
        pytest.param([None, 1, None, True, 1.0], 4, id="object"),
        pytest.param([{"a": 1}, {"a": 1}, {"b": 1}, {}, {"a": 2}, {}], 4, id="struct"),
        pytest.param([{"p": [1, 2]}, {"p": [1, 2], "q": "x"}, {"p": [1, 2]}], 2, id="struct of ragged"),
        pytest.param(np.array([0.0, -0.0, np.nan, np.nan]), 3, id="by bits"),
        pytest.param([], 0, id="no rows"),
        pytest.param(np.zeros((3, 0)), 1, id="no elements"),
        pytest.param([np.zeros(0), np.zeros(0)], 1, id="empty rows"),
        pytest.param([np.zeros((1, 0)), np.zeros((2, 0)), np.zeros((1, 0))], 2, id="items without bytes"),
    ],
)
def test_equal_rows_are_stored_once(values: Any, stored: int) -> None:
    assert _stored(values) == stored
    found, plain = column(values, dedupe=True), column(values)
    assert found.field == plain.field
    assert same(found.to_list(), plain.to_list())
    assert same(found.numpy(), plain.numpy())
    assert found.nbytes == plain.nbytes


@each_case(
    "values",
    [
        np.array([[1, 2], [1, 2], [3, 4]]),
        np.array([5, 5, 6, 7]),
        torch.tensor([[1.0], [1.0], [2.0]]),
        [{"a": 1}, {"a": 1}, {}],
    ],
)
def test_a_deduplicated_column_can_be_put_again(values: Any) -> None:
    once = column(values, dedupe=True)
    for chosen in (once, once[::-1], once[1:]):
        for again in (column(chosen), column(chosen, dedupe=True)):
            assert same(again.to_list(), chosen.to_list())


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    real = dedupe.xxhash.xxh3_128_digest
    monkeypatch.setattr(dedupe.xxhash, "xxh3_128_digest", lambda data: (found.append(len(data)), real(data))[1])
    return found


_LARGE = dedupe._LARGE_ROW + 1


@each_case("at", [1_000, _LARGE // 2 - 1, _LARGE // 2 + 1_000, _LARGE - 1_000])
def test_large_rows_that_differ_in_any_byte_are_not_deduplicated(at: int, hashed: list[int]) -> None:
    hashed.clear()  # of the case before
    rows = np.repeat(np.random.default_rng(7).integers(0, 255, (1, _LARGE), np.uint8), 6, axis=0)
    rows[1::2, at] ^= 1
    assert _stored(rows) == _stored(list(rows)) == 2
    assert len(hashed) == 12, "those that look alike, of both"
    assert same(column(rows, dedupe=True).numpy(), rows)


def test_digests_of_rows_with_shared_parts_depend_on_their_values() -> None:
    """A stream knows an append that comes again by these: other images under the same keys are no such append."""
    first, again, other = ([(row, part * 5000) for row in range(3)] for part in (b"a", b"a", b"b"))
    columns = [values_of("x", rows) for rows in (first, again, other)]
    assert all(each.index is not None for each in columns)
    of_first, of_again, of_other = (list(dedupe.digests(each)) for each in columns)
    assert of_first == of_again
    assert len({*of_first, *of_other}) == 6


# Large copies

LARGE = values._STREAMED


def some(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@each_case("more", [-1, 0, 1, 63, 64, 65, 16383, 16384, 16385])
@each_case(("to", "begin"), [(0, 0), (1, 0), (0, 1), (63, 5)])
def test_a_copy_writes_its_target_and_nothing_beside_it(more: int, to: int, begin: int) -> None:
    source, place = some(LARGE + 16448)[begin:][: LARGE + more], np.full(LARGE + 16600, 7, np.uint8)
    values.copy(place[64 + to : 64 + to + len(source)], source)
    assert (place[64 + to : 64 + to + len(source)] == source).all()
    assert (place[: 64 + to] == 7).all()
    assert (place[64 + to + len(source) :] == 7).all()


@given(st.lists(st.integers(0, 70_000), min_size=1, max_size=12), st.integers(0, 200), st.integers(0, 200))
def test_the_extension_joins_buffers_of_any_size_and_place(sizes: list[int], before: int, begin: int) -> None:
    data = some(sum(sizes) + begin)[begin:]
    cuts = np.cumsum([0, *sizes]).tolist()
    place = np.full(before + len(data) + 100, 9, np.uint8)
    _memory.join(place[before : before + len(data)], tuple(data[a:b] for a, b in pairwise(cuts)))
    assert (place[before : before + len(data)] == data).all()
    assert (place[:before] == 9).all()
    assert (place[before + len(data) :] == 9).all()


@each_case(
    ("arguments", "error"),
    [
        ((np.zeros(4, np.uint8), (b"abc",)), ValueError),
        ((np.zeros(4, np.uint8), (b"abcde",)), ValueError),
        ((b"abcd", (b"abcd",)), BufferError),
        ((np.zeros(4, np.uint8), (4,)), TypeError),
        ((np.zeros(4, np.uint8), [b"abcd"]), TypeError),
        ((np.zeros((4, 2), np.uint8)[:, 0], (b"abcd",)), ValueError),
        ((np.zeros(4, np.uint8),), TypeError),
    ],
)
def test_the_extension_refuses_invalid_buffers_and_writes_nothing(arguments: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        _memory.join(*arguments)
    assert not np.asarray(arguments[0]).any() or isinstance(arguments[0], bytes)
