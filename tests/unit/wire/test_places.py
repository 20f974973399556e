"""Places of shards as one block of numbers."""

from __future__ import annotations

import pytest

from dataplane.errors import ProtocolMismatch
from dataplane.wire.places import WIDTH, Place, numbers, pack, unpack
from tests.cases import each_case


def test_what_is_packed_is_unpacked() -> None:
    places = [Place(7, 2, 4096, 64, 0, 0), Place(1 << 62, -1, 0, 1 << 40, 3, 1)]
    packed = pack([number for place in places for number in place])
    assert [Place(*row) for row in unpack(packed).tolist()] == places
    assert numbers(packed) == [7, 1 << 62]
    assert unpack(b"").shape == (0, WIDTH)


@each_case("nbytes", [1, 8, 8 * WIDTH - 1, 8 * WIDTH + 8])
def test_what_is_no_block_is_refused(nbytes: int) -> None:
    with pytest.raises(ProtocolMismatch):
        unpack(bytes(nbytes))
