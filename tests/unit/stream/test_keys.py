"""What rows are called, and which append is the same again."""

from __future__ import annotations

import numpy as np
import pytest

from dataplane.errors import Misuse
from dataplane.stream.keys import Keys
from tests.cases import each_case


def named(*keys: str, first: int = 0) -> Keys:
    known = Keys("m")
    known.add(keys, first, b"digest")
    return known


@each_case("key", ["c", "~", "~m.", "~m.5", "~m.-1", "~m.x", "~m.²", "~m." + "9" * 19, "~3", "~n.3", ""])
def test_what_is_no_key_is_refused(key: str) -> None:
    with pytest.raises(Misuse, match="there is no row"):
        named("a", first=5).numbers([key])


@each_case(
    ("keys", "said"),
    [
        (["b", "b"], "'b' is given twice"),
        (["b", "a"], "a row 'a' already"),
        (["~1"], "does not begin"),
        (["b", ""], "one character or more"),
    ],
)
def test_what_can_not_be_a_new_key_is_refused(keys: list[str], said: str) -> None:
    with pytest.raises(Misuse, match=said):
        named("a").check(keys)


def test_another_append_is_not_taken_for_the_same() -> None:
    keys = named("a", "b", first=3)
    assert keys.retried(["a", "b"], b"digest") == 3
    assert [keys.retried(other, b"digest") for other in ([], ["b", "a"], ["a", "c"], ["a"])] == [None] * 4
    assert keys.retried(["a", "b"], b"another") is None
    keys.remove(np.array([4]))
    keys.check(["b"])
    assert keys.retried(["a", "b"], b"digest") is None
