"""Slices of rows that were made piece by piece: what they give is what the rows as one array give."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dataplane as dp
from tests.processes import StandingNode

Tokens = np.ndarray[Any, np.dtype[np.int64]]
LENGTHS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=3)
ENDS = st.one_of(st.none(), st.integers(-12, 30))


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[dp.Plane]:
    with StandingNode(tmp_path, memory="32MiB") as node, dp.connect(node.address) as plane:
        yield plane


def made(plane: dp.Plane, several: Sequence[Sequence[int]]) -> tuple[dp.BatchRef, list[Tokens]]:
    """Rows of pieces of these lengths, every other of them stored narrowly, and what they are."""
    rows: list[Tokens] = []
    stream = plane.stream("rows", tasks=["train"])
    for number, lengths in enumerate(several):
        pieces = [np.arange(2 * n).reshape(n, 2) + 1000 * number + 100 * at for at, n in enumerate(lengths)]
        with stream.begin(f"row-{number}") as row:
            for at, piece in enumerate(pieces):
                row.append(plane.put({"ids": [piece], "turn": [at]}, narrow=at % 2 == 0))
        rows.append(np.concatenate(pieces))
    delivery = stream.consume("train", rows=len(rows), min_rows=len(rows), columns=["ids", "turn"], timeout=30)
    ref = plane.retain(delivery.ref)
    delivery.ack()
    stream.drop()
    return ref, rows


@settings(suppress_health_check=list(HealthCheck))
@given(LENGTHS, ENDS, ENDS, st.integers(0, 2), st.data())
def test_slices_of_rows_of_pieces_are_those_of_the_rows(
    plane: dp.Plane, several: list[list[int]], start: int | None, stop: int | None, rank: int, data: st.DataObject
) -> None:
    ref, rows = made(plane, several)
    sliced = pickle.loads(pickle.dumps(ref.slice_rows("ids", start=start, stop=stop)))
    picked = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=4))
    share = ref.share_rows("ids", rank, 3)
    for meant, expected in (
        (sliced, [row[start:stop] for row in rows]),
        (sliced[picked], [rows[at][start:stop] for at in picked]),
        (ref[picked].slice_rows("ids", start=start, stop=stop), [rows[at][start:stop] for at in picked]),
        (dp.concat([ref, sliced]), [*rows, *[row[start:stop] for row in rows]]),
        (sliced.slice_rows("ids", start=1), [row[start:stop][1:] for row in rows]),
        (share, [row[rank * -(-len(row) // 3) : (rank + 1) * -(-len(row) // 3)] for row in rows]),
    ):
        batch = plane.get(meant)
        for found, row in zip(batch["ids"].numpy(), expected, strict=True):
            assert found.dtype == np.int64
            np.testing.assert_array_equal(found, row)
    assert plane.get(sliced)["turn"].to_list() == [len(lengths) - 1 for lengths in several]
    plane.free(ref)


def test_what_can_not_be_a_slice_or_a_piece_is_told(plane: dp.Plane) -> None:
    ref, _ = made(plane, [[2, 3]])
    with pytest.raises(dp.Misuse, match="axis 0 alone"):
        ref.slice_rows("ids", axis=1, stop=1)
    whole = plane.put({"ids": [[1, 2, 3]]})
    row = plane.stream("more", tasks=["train"]).begin("row")
    with pytest.raises(dp.Misuse, match="no slice of a row"):
        row.append(whole.slice_rows("ids", stop=2))
