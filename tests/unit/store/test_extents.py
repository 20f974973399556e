from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dataplane.store.extents import RangeSet


def runs(addresses: set[int]) -> list[tuple[int, int]]:
    """The addresses as maximal ranges, ascending."""
    found: list[tuple[int, int]] = []
    for address in sorted(addresses):
        if found and found[-1][1] == address:
            found[-1] = (found[-1][0], address + 1)
        else:
            found.append((address, address + 1))
    return found


steps = st.lists(
    st.tuples(st.sampled_from(["add", "remove"]), st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=40
)


@given(steps, st.integers(0, 90), st.integers(0, 90))
def test_a_range_set_is_a_set_of_addresses(done: list[tuple[str, int, int]], low: int, high: int) -> None:
    ranges, model = RangeSet(), set[int]()
    for what, start, size in done:
        these = set(range(start, start + size))
        if what == "add":
            assert ranges.add(start, start + size) == len(these - model)
            model |= these
        else:
            assert ranges.remove(start, start + size) == len(these & model)
            model -= these
        assert list(ranges) == runs(model)
    low, high = min(low, high), max(low, high)
    assert ranges.within(low, high) == runs(model & set(range(low, high)))
    assert ranges.covered(low, high) == len(model & set(range(low, high)))
