"""Large copies, by the extension and without it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from dataplane.batch import values
from tests.cases import each_case

LARGE = values._STREAMED


@pytest.fixture(params=["extension", "numpy"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(values, "_join", None)
    elif values._join is None:
        pytest.skip("the extension was not built: there was no C compiler")
    return str(request.param)


def some(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@each_case("more", [-1, 0, 1, 63, 64, 65, 16383, 16384, 16385])
@each_case(("to", "begin"), [(0, 0), (1, 0), (0, 1), (63, 5)])
def test_a_copy_writes_its_target_and_nothing_beside_it(way: str, more: int, to: int, begin: int) -> None:
    source, place = some(LARGE + 16448)[begin:][: LARGE + more], np.full(LARGE + 16600, 7, np.uint8)
    values.copy(place[64 + to : 64 + to + len(source)], source)
    assert (place[64 + to : 64 + to + len(source)] == source).all()
    assert (place[: 64 + to] == 7).all()
    assert (place[64 + to + len(source) :] == 7).all()


@given(st.lists(st.integers(0, 70_000), min_size=1, max_size=12), st.integers(0, 200), st.integers(0, 200))
def test_the_extension_joins_buffers_of_any_size_and_place(sizes: list[int], before: int, begin: int) -> None:
    join = values._join
    if join is None:
        pytest.skip("the extension was not built: there was no C compiler")
    data = some(sum(sizes) + begin)[begin:]
    cuts = np.cumsum([0, *sizes]).tolist()
    place = np.full(before + len(data) + 100, 9, np.uint8)
    join(place[before : before + len(data)], tuple(data[a:b] for a, b in pairwise(cuts)))
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
    join: Any = values._join
    if join is None:
        pytest.skip("the extension was not built: there was no C compiler")
    with pytest.raises(error):
        join(*arguments)
    assert not np.asarray(arguments[0]).any() or isinstance(arguments[0], bytes)
