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


def test_a_key_is_free_again_when_its_row_is_gone() -> None:
    keys = named("a", "b")
    keys.remove(np.array([0]))
    keys.check(["a"])
    with pytest.raises(Misuse):
        keys.numbers(["a"])
    assert keys.numbers(["b"]).tolist() == [1]


def test_the_very_same_append_is_known_again() -> None:
    keys = named("a", "b", first=3)
    assert keys.retried(["a", "b"], b"digest") == keys.known("a", b"digest") == 3


def test_another_append_is_not_taken_for_the_same() -> None:
    keys = named("a", "b")
    assert keys.retried([], b"digest") is None
    assert keys.retried(["b", "a"], b"digest") is None
    assert keys.retried(["a", "b"], b"another") is None
    assert keys.known("b", b"digest") is None
    keys.remove(np.array([1]))
    assert keys.retried(["a", "b"], b"digest") is None
    assert keys.known("a", b"digest") is None
