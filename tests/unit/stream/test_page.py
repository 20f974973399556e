"""Pages are as large as their rows need, and keep what they have as they grow."""

from __future__ import annotations

import tracemalloc

import numpy as np

from dataplane.batch.field import Field
from dataplane.batch.ref import BatchRef
from dataplane.stream.facts import Arrival
from dataplane.stream.home import Home
from dataplane.stream.page import PAGE, Page
from dataplane.stream.settings import Settings

INT = Field("dense", "int64", ())


def stored(shard: int, rows: int) -> BatchRef:
    return BatchRef.of(b"the-node", rows, [("x", INT, 8 * rows, shard, 0)])


def append(home: Home, rows: int, shard: int = 1) -> None:
    tags, lengths = {"t": list(range(rows))}, {"x": np.arange(rows)}
    home.append(stored(shard, rows), [], b"", Arrival(None, np.arange(rows), tags, lengths), 1.5)


def test_a_page_that_grows_keeps_what_it_has() -> None:
    page = Page(0)
    layer = page.layer(("x",))
    page.columns[3], page.gone[4], layer.patch[5], layer.index[5] = 7, True, 8, 9
    for rows in (1, 16, 17, 1000, PAGE):
        page.need(rows)
        assert rows <= page.room == len(page.columns) == len(page.gone) == len(layer.patch) == len(layer.index)
    assert (int(page.columns[3]), bool(page.gone[4]), int(layer.patch[5]), int(layer.index[5])) == (7, True, 8, 9)
    assert (int(page.columns.sum()), int(page.gone.sum()), int(layer.patch.max()), int(layer.patch.min())) == (
        7,
        1,
        8,
        -1,
    )


def test_a_stream_of_one_row_takes_less_than_16_kib() -> None:
    many = 200
    tracemalloc.start()
    try:
        homes = [Home(Settings(("reward", "actor"))) for _ in range(many)]
        for home in homes:
            append(home, 1)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used / many < 16 << 10
