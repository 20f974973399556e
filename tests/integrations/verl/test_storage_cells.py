"""The index of the backend: cells made of what was put, and references made of cells."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import dataplane
from dataplane.batch import locations
from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.batch.ref import BatchRef
from dataplane.errors import Corrupt
from dataplane.integrations.verl.cells import DENSE, ROWS, TENSOR, cells, find

NODE, ELSEWHERE = b"12345678", b"87654321"
TOKENS, PIXELS, TEXT = Field("ragged", "int64", (None,)), Field("ragged", "float32", (None, 8)), Field("text")

_numbers = itertools.count(1)


def put(rows: int, node: bytes = NODE, **fields: Field) -> BatchRef:
    return ref_to(node, rows, [(name, field, 80, next(_numbers), 0) for name, field in fields.items()])


def meant(ref: BatchRef, name: str) -> list[tuple[bytes, int, int]]:
    """Which stored row each row is."""
    return [(p.node, p.shard, int(row)) for p in locations.pieces(ref, name) for row in p.rows.array()]


def test_one_put_is_one_reference_in_any_order_of_rows() -> None:
    ref = put(6, x=TOKENS, y=PIXELS)
    made = cells(ref, {"x": DENSE, "y": TENSOR})
    assert max(map(len, made["x"] + made["y"])) < 80
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 4], [2], [1, 1, 0]):
        (found,) = find({name: [column[i] for i in order] for name, column in made.items()})
        assert found.positions is None
        assert found.how == {"x": DENSE, "y": TENSOR}
        assert found.ref == ref[order]


@pytest.mark.parametrize("reading", [False, True])
def test_cells_of_single_puts_and_links_form_one_reference(reading: bool) -> None:
    """Of each row most fields are in a shard of its own, one is in another's, by a link, and one differs in shape."""
    firsts = [
        put(1, NODE if i % 3 else ELSEWHERE, x=TOKENS, y=Field("ragged", "int64", (None, i % 4))) for i in range(9)
    ]
    shared = put(1, z=TEXT)
    links = [locations.numbered(shared, lambda key, i=i: key[1] | (i + 1) << 40) for i in range(9)]  # type: ignore[misc]
    made = [
        cells(first, {"x": TENSOR, "y": DENSE}) | cells(link, {"z": ROWS})
        for first, link in zip(firsts, links, strict=True)
    ]
    (found,) = find({name: [each[name][0] for each in made] for name in ("x", "y", "z")}, reading=reading)
    assert found.positions is None
    assert found.how == {"x": TENSOR, "y": DENSE, "z": ROWS}
    assert found.ref.schema["y"] == Field("ragged", "int64", (None, None))
    for name in ("x", "y"):
        assert meant(found.ref, name) == [m for first in firsts for m in meant(first, name)]
    expected = [meant(shared if reading else link, "z")[0] for link in links]
    assert meant(found.ref, "z") == expected
    assert found.ref.nbytes == 9 * 3 * 80
    assert BatchRef.decode(found.ref.encode()) == found.ref


def test_an_invalid_cell_is_corrupt() -> None:
    (cell,) = cells(put(1, x=TOKENS), {"x": TENSOR})["x"]
    beyond = (1).to_bytes(8, "little") + cell[8:]
    for false in (b"", b"x", cell[:20], cell[:-1], beyond, cell[:8] + b"\xff" * 60, cell + b"x"):
        with pytest.raises(Corrupt):
            find({"x": [false]})
    source = np.random.default_rng(0)
    for _ in range(300):
        garbled = bytearray(cell)
        garbled[int(source.integers(len(cell)))] ^= int(source.integers(1, 256))
        try:
            find({"x": [bytes(garbled)]})
        except Corrupt:
            continue


READERS = [
    tracemalloc.Filter(True, f"{Path(dataplane.__file__).parent}/{part}/*") for part in ("batch", "integrations/verl")
]


def test_reading_many_cells_retains_no_memory() -> None:
    """As verl's controller does, which clears each row of a job; a cache of 65,536 cells was 35 MiB."""
    refs = [put(1, x=TOKENS, y=Field("dense", "float32", (300,))) for _ in range(4000)]
    fields = [cells(ref, {"x": TENSOR, "y": TENSOR}) for ref in refs]
    find(fields[0])
    tracemalloc.start()
    try:
        for each in fields:
            find(each)
        gc.collect()
        kept = tracemalloc.take_snapshot().filter_traces(READERS)  # other threads of this process allocate too
    finally:
        tracemalloc.stop()
    assert sum(trace.size for trace in kept.traces) < 64 << 10
