"""Pieces of a column that are of one stored column, brought together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from dataplane.batch.ref import Piece
from dataplane.batch.rows import Rows
from dataplane.client.opening import _once

_rows = st.builds(Rows.index, st.lists(st.integers(0, 5), min_size=1, max_size=4))
_pieces = st.lists(st.builds(Piece, st.just(b"12345678"), st.integers(0, 3), st.integers(0, 1), _rows), max_size=8)


def meant(pieces: tuple[Piece, ...], order: npt.NDArray[np.int64] | None) -> list[tuple[int, int, int]]:
    rows = [(piece.shard, piece.ordinal, int(row)) for piece in pieces for row in piece.rows.array()]
    return rows if order is None else [rows[at] for at in order.tolist()]


@given(_pieces, st.booleans())
def test_each_stored_column_is_one_piece_and_rows_are_the_same(pieces: list[Piece], turned: bool) -> None:
    given = tuple(pieces)
    count = sum(len(piece.rows) for piece in given)
    order = np.random.default_rng(count).permutation(count) if turned else None
    found, then = _once(given, order)
    assert meant(found, then) == meant(given, order)
    assert len({piece[:3] for piece in found}) == len(found)
