"""Small shards that share pages: where they lie, and when a page goes back."""

from __future__ import annotations

import itertools
import random

from dataplane.config import PAGE
from dataplane.store.arena import Arena, Extent
from dataplane.store.small_extents import SmallExtents
from tests.cases import each_case

OWN = "node"


def made(pages: int = 64) -> tuple[Arena, SmallExtents]:
    arena = Arena(pages * PAGE)
    return arena, SmallExtents(arena, OWN)


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
