"""Deltas: what they make is what was published, whatever changed; what is false is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.errors import Corrupt
from dataplane.weights import deltas
from dataplane.weights.deltas import BLOCK, apply, encode


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
def test_a_delta_reproduces_any_change(width: int, elements: int, runs: list[tuple[int, int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    old = rng.integers(0, 256, elements * width).astype(np.uint8)
    new = old.copy()
    for start, count in runs:
        new[start * width : (start + count) * width] = rng.integers(0, 256)
    delta = encode(old, new, width, 1 << 30)
    assert delta is not None
    assert np.array_equal(made(old, delta), new)


def test_a_damaged_or_mismatched_delta_is_corrupt() -> None:
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
