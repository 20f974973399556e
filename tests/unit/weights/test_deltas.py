"""Deltas: what they make is what was published, whatever changed; what is false is refused."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import Corrupt
from dataplane.weights import deltas
from dataplane.weights.deltas import BLOCK, apply, encode, unchanged, worth
from tests.cases import each_case

WAYS = ["python", *(["extension"] if deltas._sparse is not None else [])]


@pytest.fixture(params=WAYS, autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    before = deltas._some, deltas._patch
    if request.param == "python":
        deltas._some, deltas._patch = deltas._some_here, deltas._patch_here
    yield request.param
    deltas._some, deltas._patch = before


def array(data: bytes) -> deltas.Bytes:
    return np.frombuffer(data, np.uint8)


def made(old: deltas.Bytes, *several: bytes) -> deltas.Bytes:
    into = np.full(len(old), 0xEE, np.uint8)
    apply(old, [array(each) for each in several], into)
    return into


def changed(old: deltas.Bytes, width: int, share: float, seed: int = 0) -> deltas.Bytes:
    rng = np.random.default_rng(seed)
    new = old.copy()
    elements = new.reshape(-1, width)
    elements[rng.random(len(elements)) < share] ^= 1
    return new


@given(
    width=st.sampled_from([1, 2, 4, 8]),
    elements=st.integers(0, 3000),
    runs=st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 600)), max_size=6),
    seed=st.integers(0, 1 << 20),
)
def test_any_change_is_made_again(width: int, elements: int, runs: list[tuple[int, int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, elements * width).astype(np.uint8)
    new = old.copy()
    for start, count in runs:
        new[start * width : (start + count) * width] = rng.integers(0, 256)
    delta = encode(old, new, width, 1 << 30)
    assert delta is not None
    assert np.array_equal(made(old, delta), new)
    assert unchanged(delta) == np.array_equal(old, new)


@each_case("width", [1, 2, 4, 8])
@each_case("share", [0.0, 0.0001, 0.02, 0.3, 1.0])
def test_several_blocks_are_made_again_and_both_ways_encode_alike(width: int, share: float) -> None:
    old = np.random.default_rng(1).integers(0, 256, 2 * BLOCK + 640).astype(np.uint8)
    new = changed(old, width, share)
    delta = encode(old, new, width, 1 << 30)
    assert delta is not None
    assert np.array_equal(made(old, delta), new)
    known = deltas._some_here(old[:BLOCK], new[:BLOCK], width)
    assert deltas._some(old[:BLOCK], new[:BLOCK], width) == known


def test_two_percent_of_bfloat16_cost_little_more_than_three() -> None:
    old = np.random.default_rng(1).integers(0, 256, 4 * BLOCK).astype(np.uint8)
    delta = encode(old, changed(old, 2, 0.02), 2, len(old))
    assert delta is not None
    assert len(delta) < 0.035 * len(old)


def test_deltas_follow_one_another() -> None:
    first = np.random.default_rng(1).integers(0, 256, BLOCK + 100).astype(np.uint8)
    second = changed(first, 2, 0.1, 1)
    third = changed(second, 2, 0.01, 2)
    fourth = third.copy()
    fourth[:BLOCK] = 7
    several = [encode(a, b, 2, 1 << 30) for a, b in ((first, second), (second, third), (third, fourth))]
    assert np.array_equal(made(first, *[each for each in several if each]), fourth)


def test_what_would_be_too_much_is_none() -> None:
    old = np.zeros(4 * BLOCK, np.uint8)
    new = np.random.default_rng(1).integers(1, 256, len(old)).astype(np.uint8)
    assert encode(old, new, 2, len(old) // 2) is None
    assert not worth(old, new, 2)
    assert worth(old, changed(old, 2, 0.1), 2)
    assert worth(old, np.concatenate([new[:BLOCK], old[BLOCK:]]), 2)
    assert worth(old[:64], new[:64], 2)


def test_a_false_delta_is_refused() -> None:
    old = np.random.default_rng(1).integers(0, 256, 2 * BLOCK).astype(np.uint8)
    delta = encode(old, changed(old, 2, 0.02), 2, len(old))
    assert delta is not None
    with pytest.raises(Corrupt):
        made(changed(old, 2, 0.001, 5), delta)
    with pytest.raises(Corrupt):
        made(old[:-2], delta)
    for cut in (0, 5, 30, len(delta) - 1):
        with pytest.raises(Corrupt):
            made(old, delta[:cut])
    rng = np.random.default_rng(2)
    for _ in range(100):
        wrong = bytearray(delta)
        wrong[rng.integers(len(wrong))] ^= 1 << rng.integers(8)
        try:
            assert np.array_equal(made(old, bytes(wrong)), made(old, delta))  # a bit that nobody reads
        except Corrupt:
            pass


@each_case(("share", "most"), [(0.02, 1 << 30), (0.4, 1000)])
def test_what_is_written_while_it_is_encoded_is_all_there(share: float, most: int) -> None:
    old = np.random.default_rng(1).integers(0, 256, 2 * BLOCK + 64).astype(np.uint8)
    new, into = changed(old, 2, share), np.zeros_like(old)

    def fill(start: int, stop: int) -> None:
        into[start:stop] = new[start:stop]

    assert encode(old, into, 2, most, fill) == encode(old, new, 2, most)  # None, of more than `most`
    assert np.array_equal(into, new)
