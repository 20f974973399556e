from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dataplane.store.extents import FreeList, RangeSet


def runs(addresses: set[int]) -> list[tuple[int, int]]:
    """The addresses as maximal ranges, ascending."""
    found: list[tuple[int, int]] = []
    for address in sorted(addresses):
        if found and found[-1][1] == address:
            found[-1] = (found[-1][0], address + 1)
        else:
            found.append((address, address + 1))
    return found


class FreeListAgainstASet(RuleBasedStateMachine):
    @initialize(size=st.integers(1, 200))
    def begin(self, size: int) -> None:
        self.list = FreeList(size)
        self.free = set(range(size))
        self.taken: list[tuple[int, int]] = []

    @rule(size=st.integers(1, 40))
    def take(self, size: int) -> None:
        start = self.list.take(size)
        if start is None:
            assert all(end - begin < size for begin, end in runs(self.free)), "there was room"
            return
        got = set(range(start, start + size))
        assert got <= self.free, "handed out twice"
        self.free -= got
        self.taken.append((start, size))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        start, size = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.list.give(start, size)
        self.free |= set(range(start, start + size))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give_a_part(self, data: st.DataObject) -> None:
        start, size = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        kept = data.draw(st.integers(0, size - 1))
        self.list.give(start + kept, size - kept)
        self.free |= set(range(start + kept, start + size))
        if kept:
            self.taken.append((start, kept))

    @precondition(lambda self: self.free)
    @rule(data=st.data(), size=st.integers(1, 40))
    def give_what_is_free(self, data: st.DataObject, size: int) -> None:
        start = data.draw(st.sampled_from(sorted(self.free)))
        with pytest.raises(ValueError, match="free already"):
            self.list.give(max(0, start - size // 2), size)

    @invariant()
    def same(self) -> None:
        assert sorted(self.list) == runs(self.free), "neighbours are merged"
        assert self.list.free == len(self.free)


TestFreeListAgainstASet = FreeListAgainstASet.TestCase


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
