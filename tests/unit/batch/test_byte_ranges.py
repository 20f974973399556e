"""Ranges of bytes, against the sets of their bytes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from dataplane.batch.byte_ranges import ByteRanges, merged, rounded, total, without

SIZE = 61
RANGES = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=8)


def bytes_of(ranges: ByteRanges) -> set[int]:
    return {byte for start, stop in ranges for byte in range(start, stop)}


@given(RANGES, RANGES)
def test_present_ranges_are_subtracted_from_wanted_ranges(wanted: ByteRanges, there: ByteRanges) -> None:
    wanted, there = merged(wanted, 0), merged(there, 0)
    left = without(wanted, there)
    assert bytes_of(left) == bytes_of(wanted) - bytes_of(there)
    assert total(left) == len(bytes_of(left))


@given(RANGES, st.integers(0, 8))
def test_ranges_within_the_gap_are_merged(ranges: ByteRanges, gap: int) -> None:
    found = merged(ranges, gap)
    assert bytes_of(ranges) <= bytes_of(found)
    assert all(after[0] - before[1] > gap for before, after in pairwise(found))


@given(RANGES, st.sampled_from((1, 4, 16)))
def test_rounded_ranges_are_whole_units(ranges: ByteRanges, unit: int) -> None:
    ranges = merged(ranges, 0)
    found = bytes_of(rounded(ranges, unit, SIZE))
    units = {byte // unit for byte in bytes_of(ranges)}
    assert found == {byte for byte in range(SIZE) if byte // unit in units}
