"""Many shards that lie alike: checked together, read in one pass, as strictly as one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dataplane.batch.batch import Column
from dataplane.batch.layout import ShardLayout
from dataplane.batch.layout_check import _FEW, CheckedLayout, check_layout, check_layouts
from dataplane.batch.put_plan import plan
from dataplane.batch.rows import RowIndices
from dataplane.batch.stored_column import Scattered, Selection, Stack
from dataplane.errors import Corrupt
from tests.cases import each_case
from tests.unit.batch.exact import filled, local_batch


def columns(i: int) -> dict[str, Any]:
    """A batch of one to three rows, of every kind."""
    rows = 1 + i % 3
    return {
        "dense": np.full((rows, 2), i, np.float32),
        "ragged": [np.arange(i + row, dtype=np.int64) for row in range(rows)],
        "text": [f"text {i}" * row for row in range(rows)],
        "object": [{"i": i}] * rows,
        "struct": [{"b": "y"} if row else {"a": np.arange(i), "b": "x"} for row in range(rows)],
    }


def stored(given: dict[str, Any]) -> tuple[bytes, np.ndarray[Any, Any]]:
    planned = plan(given)
    memory = filled(planned)
    return planned.layout().encode(), memory


def stack_of(shards: list[tuple[bytes, np.ndarray[Any, Any]]]) -> tuple[Stack, list[CheckedLayout]]:
    known = check_layouts([layout for layout, _ in shards], [len(memory) for _, memory in shards])
    assert len({id(each.outline) for each in known}) == 1
    table = np.array([each.numbers for each in known])
    return Stack(known[0].outline, table, Scattered.of([memory for _, memory in shards])), known


def test_a_stack_reads_as_its_shards_do() -> None:
    given = [columns(i) for i in range(1, 20)]
    stack, _ = stack_of([stored(each) for each in given])
    for ordinal, name in enumerate(given[0]):
        stacked = stack.column(name, ordinal)
        column = Column.of(name, stacked.layout.field, [Selection(stacked, RowIndices.range(0, stacked.layout.rows))])
        expected = [row for each in given for row in local_batch(each)[name].to_list()]
        assert column.to_list() == expected, name
        backwards = np.arange(len(column))[::-1].copy()
        assert Column.of(name, stacked.layout.field, column._selections, backwards).to_list() == expected[::-1], name


@each_case("many", [1, _FEW])
@each_case("value", [0, 2, -1, 1 << 61, (1 << 61) + 1, (1 << 62) + 1, (1 << 63) - 1])
def test_layouts_checked_together_are_refused_like_single_ones(value: int, many: int) -> None:
    encoded, memory = stored({"r": [np.arange(3)], "s": [{"a": "x", "b": 1}], "d": np.zeros((1, 3), np.int64)})
    (good,) = check_layouts([encoded], [len(memory)])
    for at in range(len(good.numbers)):
        numbers = good.numbers.copy()
        numbers[at] = value
        layout = ShardLayout.of(good.outline, numbers)
        together = [encoded] * many + [layout.encode()]
        if _refused(layout, len(memory)):
            with pytest.raises(Corrupt):
                check_layouts(together, [len(memory)] * len(together))
        else:
            check_layouts(together, [len(memory)] * len(together))


def _refused(layout: ShardLayout, nbytes: int) -> bool:
    try:
        check_layout(layout.encode(), nbytes)
    except Corrupt:
        return True
    return False


@each_case("memories", [1, 3])
@each_case("distances", ["even", "touching", "uneven", "backwards", "the same", "one"])
@each_case("sizes", ["equal", "different", "none"])
def test_scattered_parts_are_gathered_at_any_distance_and_size(memories: int, distances: str, sizes: str) -> None:
    """Those at one distance are copied in one go: it must be the same."""
    chance, count = np.random.default_rng(1), 1 if distances == "one" else 7
    held = [chance.integers(0, 256, 1000).astype(np.uint8) for _ in range(memories)]
    bases = {
        "even": np.arange(count) * 100,
        "touching": np.arange(count) * 24,
        "uneven": np.arange(count) ** 2 * 10,
        "backwards": 600 - np.arange(count) * 100,
        "the same": np.full(count, 40),
        "one": np.array([40]),
    }[distances]
    lengths = {"equal": np.full(count, 24), "different": np.arange(count) + 20, "none": np.zeros(count, np.int64)}[
        sizes
    ]
    which = np.arange(count) % memories
    starts = np.full(count, 8)
    gathered = Scattered(held, which, bases).gathered(starts, lengths)
    rows = zip(which.tolist(), bases.tolist(), lengths.tolist(), strict=True)
    assert gathered.tolist() == [value for at, base, n in rows for value in held[at][base + 8 : base + 8 + n].tolist()]
    gathered[:] = 0
    assert all(each.any() for each in held)  # it is a copy
