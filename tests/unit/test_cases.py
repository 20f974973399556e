"""Cases of a test: each is run by itself, and an error names the one that it is of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cases import each_case


@each_case("number", [1, 2, 3])
def test_each_case_has_a_separate_directory_and_patches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    assert not hasattr(each_case, "number")
    monkeypatch.setattr(each_case, "number", number, raising=False)
    (tmp_path / "file").touch(exist_ok=False)


def test_case_lists_are_combined_and_errors_name_their_case() -> None:
    seen: list[Any] = []

    @each_case("first", ["a", "b"])
    @each_case(("second", "third"), [(1, 2), pytest.param(3, 4, id="last")])
    def run(first: str, second: int, third: int) -> None:
        seen.append((first, second, third))
        assert (first, third) != ("b", 4)

    with pytest.raises(AssertionError) as error:
        run()
    assert seen == [("a", 1, 2), ("a", 3, 4), ("b", 1, 2), ("b", 3, 4)]
    assert error.value.__notes__ == ["case 1: second = 3, third = 4", "case 1: first = 'b'"]
