"""Mappings of a segment, and views that keep what they look into."""

from __future__ import annotations

import gc
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dataplane.client.memory import HeldShard, Segment
from tests.cases import each_case

PAGE = mmap.PAGESIZE
SIZE = 16 * PAGE


class Pin:
    """Anything that can be held."""


@pytest.fixture
def fd() -> Iterator[int]:
    """A memfd with a different value in each page; the test's own descriptor of it."""
    fd = os.memfd_create("dataplane-test")
    os.write(fd, np.repeat(np.arange(SIZE // PAGE, dtype=np.uint8), PAGE).tobytes())
    yield fd
    os.close(fd)


@pytest.fixture
def segment(fd: int) -> Iterator[Segment]:
    segment = Segment(0, SIZE)
    segment.grant(os.dup(fd), writable=True)
    segment.grant(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY), writable=False)
    yield segment
    segment._descriptors.clear()  # pytest keeps the fixture's value beyond the test
    segment._mappings.clear()


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:dataplane-test")


def test_a_segment_is_mapped_once_for_each_right(segment: Segment) -> None:
    before = mappings()
    kept = [segment.mapping(writable=writable).array(i, 1) for i in range(10) for writable in (True, False)]
    assert mappings() == before + 2
    assert len(kept) == 20


def test_the_read_only_mapping_is_read_only(segment: Segment) -> None:
    array = segment.mapping(writable=False).array(3 * PAGE, PAGE)
    assert array.tolist() == [3] * PAGE
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.setflags(write=True)


@each_case(("offset", "size"), [(-1, 1), (0, SIZE + 1), (SIZE, 1), (1, -1)])
def test_beyond_a_mapping(segment: Segment, offset: int, size: int) -> None:
    with pytest.raises(ValueError, match="of a mapping"):
        segment.mapping(writable=False).array(offset, size)


class TestHeldShard:
    def test_a_shard_that_shares_its_pages_is_read_and_copied_where_it_lies(self, segment: Segment) -> None:
        held = HeldShard(segment, 4 * PAGE - 64, 128, Pin())
        assert held.read(60, 8).tolist() == [3] * 4 + [4] * 4
        private = held.private(60, 8)
        assert private.tolist() == [3] * 4 + [4] * 4
        private[:] = 9
        assert held.private(0, 128).tolist() == [3] * 60 + [9] * 8 + [4] * 60
        assert held.read(60, 8).tolist() == [3] * 4 + [4] * 4

    def test_shards_that_share_a_pin_are_parts_of_one_array(self, segment: Segment) -> None:
        pin = Pin()
        whole = segment.mapping(writable=False).array(2 * PAGE, 2 * PAGE, pin)
        held, gone = HeldShard(segment, 3 * PAGE, 64, pin, whole[PAGE : PAGE + 64]), weakref.ref(pin)
        view = held.read(32, 8)
        assert (view.tolist(), view.flags.writeable) == ([3] * 8, False)
        del whole, held, pin
        assert gone() is not None
        del view
        assert gone() is None

    @pytest.mark.parametrize("how", ["read", "private", "own"])
    def test_views_keep_the_pin(self, segment: Segment, how: str) -> None:
        pin = Pin()
        gone = weakref.ref(pin)
        held = HeldShard(segment, 0, PAGE, pin)
        view = getattr(held, how)(0, PAGE)
        del pin, held
        gc.collect()
        assert gone() is not None
        del view
        assert gone() is None

    @each_case("how", ["read", "private", "own"])
    @each_case(("offset", "size"), [(-1, 1), (PAGE, 1), (0, PAGE + 1), (8, -8)])
    def test_beyond_the_shard(self, segment: Segment, how: str, offset: int, size: int) -> None:
        with pytest.raises(ValueError, match="of a shard"):
            getattr(HeldShard(segment, PAGE, PAGE, Pin()), how)(offset, size)
