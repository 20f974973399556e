"""Mappings of a segment, and views that keep what they look into."""

from __future__ import annotations

import gc
import mmap
import os
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from dataplane.client.memory import HeldShard, Segment

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


def test_the_read_only_mapping_is_read_only(segment: Segment) -> None:
    array = segment.mapping(writable=False).array(3 * PAGE, PAGE)
    assert array.tolist() == [3] * PAGE
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        array.setflags(write=True)


class TestHeldShard:
    def test_a_shard_that_shares_its_pages_is_read_and_copied_where_it_lies(self, segment: Segment) -> None:
        held = HeldShard(segment, 4 * PAGE - 64, 128, Pin())
        assert held.read(60, 8).tolist() == [3] * 4 + [4] * 4
        private = held.private(60, 8)
        assert private.tolist() == [3] * 4 + [4] * 4
        private[:] = 9
        assert held.private(0, 128).tolist() == [3] * 60 + [9] * 8 + [4] * 60
        assert held.read(60, 8).tolist() == [3] * 4 + [4] * 4

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
