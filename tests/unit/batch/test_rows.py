"""Selections of rows: ranges where they can be, and exact either way."""

from __future__ import annotations

import pytest

from dataplane.batch.rows import Rows
from tests.cases import each_case


@each_case(("top", "width"), [(255, 1), (256, 2), (65_535, 2), (65_536, 4), (2**32 - 1, 4), (2**32, 8)])
def test_an_index_takes_the_smallest_integers(top: int, width: int) -> None:
    selected = Rows.index([top, 0, 1])
    start, stop, packed = selected.encode()
    assert (start, stop, len(packed)) == (0, top + 1, 1 + 3 * width)
    assert Rows.decode((start, stop, packed)) == selected


@each_case(
    "encoded",
    [
        (2, 1, b""),
        (-1, 1, b""),
        (0, 3),
        (0, 3, "B"),
        ("0", 3, b""),
        (0, 3, b"X123"),
        (0, 3, b"H123"),
        (0, 2**64, b"Q" + b"\xff" * 8),
    ],
)
def test_what_was_not_encoded_is_refused(encoded: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Rows.decode(encoded)
