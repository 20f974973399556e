"""What rows are called, and which append is the same again."""

from __future__ import annotations

import pytest

from dataplane.errors import Misuse
from dataplane.stream.keys import Keys
from tests.cases import each_case


def named(*keys: str, first: int = 0) -> Keys:
    known = Keys("m")
    known.add(keys, first, b"digest")
    return known


@each_case("key", ["c", "~", "~m.", "~m.5", "~m.-1", "~m.x", "~m.²", "~m." + "9" * 19, "~3", "~n.3", ""])
def test_invalid_row_keys_are_refused(key: str) -> None:
    with pytest.raises(Misuse, match="there is no row"):
        named("a", first=5).numbers([key])
