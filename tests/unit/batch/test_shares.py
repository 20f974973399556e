"""A rank's share of packed rows, against the packing itself."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from dataplane.batch.shares import packed_share
from dataplane.errors import Misuse
from tests.cases import each_case


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 5), st.integers(1, 6))
def test_the_shares_of_all_ranks_are_the_pack(lengths: list[int], ranks: int, multiple: int) -> None:
    padded = [-(-length // multiple) * multiple for length in lengths]
    pack = [(row, at) if at < length else None for row, length in enumerate(lengths) for at in range(padded[row])]
    pack += [None] * (-len(pack) % ranks)
    part = len(pack) // ranks
    for rank in range(ranks):
        start, stop = packed_share(lengths, rank, ranks, multiple=multiple)
        mine = [(row, at) for row in range(len(lengths)) for at in range(int(start[row]), int(stop[row]))]
        assert mine == [token for token in pack[rank * part : (rank + 1) * part] if token is not None]
        assert start.dtype == stop.dtype == np.int64


@each_case(
    ("lengths", "rank", "ranks", "multiple"),
    [
        ([1], 2, 2, 1),
        ([1], -1, 2, 1),
        ([-1], 0, 2, 1),
        ([1.5], 0, 2, 1),
        ([[1]], 0, 2, 1),
        ([1], 0, 2, 0),
        ([1], "a", 2, 1),
    ],
)
def test_what_is_no_share(lengths: Any, rank: Any, ranks: Any, multiple: Any) -> None:
    with pytest.raises(Misuse):
        packed_share(lengths, rank, ranks, multiple=multiple)
