"""Small shards that share pages: where they lie, and when a page goes back."""

from __future__ import annotations

import itertools
import random

from dataplane.config import PAGE
from dataplane.store.arena import Arena, Extent
from dataplane.store.shared import SharedPages
from tests.cases import each_case

OWN = "node"


def made(pages: int = 64) -> tuple[Arena, SharedPages]:
    arena = Arena(pages * PAGE)
    return arena, SharedPages(arena, OWN)


def test_a_page_goes_back_with_the_last_shard_that_lies_in_it() -> None:
    arena, shared = made()
    first, across, last = shared.take(3000), shared.take(3000), shared.take(2000)
    assert (across.offset, arena.used) == (3008, 2 * PAGE)
    assert (shared.give(first), arena.used) == (0, 2 * PAGE)
    assert (shared.give(last), arena.used) == (0, 2 * PAGE)
    assert (shared.give(across), arena.used) == (2 * PAGE, 0)
    arena.close()


def test_nothing_more_goes_where_a_page_went_back() -> None:
    """Somebody else may have it by now."""
    arena, shared = made()
    shared.give(shared.take(64))
    assert not shared.fits(64)
    theirs = arena.allocate(OWN, PAGE)
    ours = shared.take(64)
    assert (ours.segment, ours.offset // PAGE) != (theirs.segment, theirs.offset // PAGE)
    arena.close()


def test_nothing_goes_into_a_segment_that_was_retired() -> None:
    arena, shared = made()
    first = shared.take(64)
    arena.depart(OWN)
    assert not shared.fits(64)
    second = shared.take(64)
    assert second.segment != first.segment
    assert shared.give(first) == PAGE
    assert first.segment not in arena
    arena.close()


@each_case("seed", range(5))
def test_places_never_overlap_and_all_comes_back(seed: int) -> None:
    chance = random.Random(seed)
    arena, shared = made(512)
    there: list[Extent] = []
    for _ in range(2000):
        if there and chance.random() < 0.5:
            shared.give(there.pop(chance.randrange(len(there))))
        elif arena.used < 400 * PAGE:
            there.append(shared.take(chance.choice([0, 1, 64, 1000, 5000, 16 << 10])))
        assert arena.used == shared.nbytes
    ordered = sorted(there, key=lambda place: (place.segment, place.offset))
    for one, other in itertools.pairwise(ordered):
        assert one.segment != other.segment or one.end <= other.offset
    for place in there:
        shared.give(place)
    assert arena.used == 0
    arena.close()
