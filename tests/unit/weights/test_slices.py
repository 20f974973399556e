"""Slices against a model: what covers what is asked for, and which bytes that is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.client.weight_map import TensorPiece, ranges_of
from dataplane.errors import Corrupt
from dataplane.weights.layout import Base, PublishedPart, TensorSlice, decode
from dataplane.weights.slices import Box, box_of, common, count, cover


def boxes(shape: tuple[int, ...]) -> st.SearchStrategy[Box]:
    each = [st.tuples(st.integers(0, n), st.integers(0, n)).map(lambda pair: (min(pair), max(pair))) for n in shape]
    return st.tuples(*each)


SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def indexes(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


@given(st.data())
def test_a_cover_names_each_element_once(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    wanted = data.draw(boxes(shape))
    pieces = data.draw(st.lists(boxes(shape), max_size=5))
    found, missing = cover(wanted, pieces)
    times = np.zeros(shape, int)
    for number, box in found:
        assert common(box, pieces[number]) == box
        times[indexes(box)] += 1
    for box in missing:
        times[indexes(box)] += 100
    published = np.zeros(shape, bool)
    for piece in pieces:
        published[indexes(piece)] = True
    expected = np.zeros(shape, int)
    expected[indexes(wanted)] = np.where(published[indexes(wanted)], 1, 100)
    assert np.array_equal(times, expected)


@given(st.data())
def test_byte_ranges_of_a_chunk_contain_all_needed_bytes_and_few_others(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple))
    entry = TensorSlice("w", "float32", shape, (0,) * len(shape), shape, 0, 64)
    parts = [box for box in data.draw(st.lists(boxes(shape), min_size=1, max_size=3)) if count(box)]
    nbytes = 64 + entry.nbytes + 64
    if not parts:
        return
    packed = ranges_of(nbytes, [TensorPiece.of(entry, box, 0) for box in parts])
    found = np.frombuffer(packed, "<i8").reshape(-1, 2) if packed else np.array([[0, nbytes]])
    assert (np.diff(found.reshape(-1)) > 0).all()
    read = np.zeros(nbytes, bool)
    for start, stop in found.tolist():
        read[start:stop] = True
    needed = np.zeros((*shape, 4), bool)
    for box in parts:
        needed[indexes(box)] = True
    inside = read[64 : 64 + entry.nbytes]
    bytes_needed = needed.reshape(-1)
    assert inside[bytes_needed].all()
    edges = np.flatnonzero(np.diff(np.concatenate([[False], bytes_needed, [False]])))
    between = zip(edges[1:-1:2].tolist(), edges[2:-1:2].tolist(), strict=True)
    assert not any(inside[start:stop].any() for start, stop in between if stop - start > 64)
    assert not packed or not (inside[: edges[0]].any() or inside[edges[-1] :].any())


def test_a_published_part_round_trips_and_an_invalid_one_is_corrupt() -> None:
    entry = TensorSlice("w", "bfloat16", (4, 6), (2, 0), (2, 6), 0, 64)
    part = PublishedPart(3, 0, 2, [88], [entry], {0: Base(2, b"node", 17)})
    assert decode(part.encode()) == part
    assert (part.nbytes, entry.nbytes, entry.box) == (88, 24, box_of((2, 0), (2, 6)))
    wrong = [
        TensorSlice("w", "bfloat16", (4, 6), (3, 0), (2, 6), 0, 64),
        TensorSlice("w", "bfloat16", (4, 6), (2, 0), (2, 6), 0, 66),
        TensorSlice("w", "bfloat16", (4, 6), (2, 0), (2, 6), 0, 63),
        TensorSlice("w", "bfloat16", (4, 6), (2, 0), (2, 6), 1, 0),
        TensorSlice("w", "bfloat16", (4, 6), (2, 0), (2, 6), -1, 0),
        TensorSlice("w", "bfloat16", (4,), (2, 0), (2, 6), 0, 0),
        TensorSlice("w", "nothing", (4, 6), (2, 0), (2, 6), 0, 0),
    ]
    for each in wrong:
        with pytest.raises(Corrupt):
            decode(PublishedPart(3, 0, 2, [88], [each]).encode())
    with pytest.raises(Corrupt):
        decode(b"\x93")
