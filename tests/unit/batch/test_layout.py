from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.batch.batch import Batch, Column
from dataplane.batch.field import Field
from dataplane.batch.layout import ColumnLayout, ShardLayout, aligned_bytes, check_contents
from dataplane.batch.layout_check import _FEW, CheckedLayout, check_layout, check_layouts
from dataplane.batch.put_plan import plan
from dataplane.batch.rows import RowIndices
from dataplane.batch.stored_column import Scattered, Selection, Stack, StoredPiece
from dataplane.errors import Corrupt, DataplaneError
from tests.cases import each_case
from tests.unit.batch.exact import LocalMemory, filled, local_batch, of_pieces

_PLAN = plan(
    {
        "dense": np.arange(12, dtype=np.float32).reshape(4, 3),
        "ragged": [np.arange(n) for n in (2, 0, 3, 1)],
        "images": [np.ones((2, n, 3), np.float32) for n in (1, 2, 0, 3)],
        "text": ["a", "bc", "", "ü"],
        "object": [None, 1, (2,), {"k": 3}],
        "struct": [{"a": 1}, {"b": "x"}, {}, {"a": 2, "b": "y"}],
        "repeated": ["r", "r", "s", "r"],
    },
    dedupe=["repeated"],
)


def _shard() -> tuple[ShardLayout, np.ndarray[Any, Any]]:
    memory = filled(_PLAN)
    return _PLAN.layout(), memory


def _column(field: Field, rows: int, *buffers: tuple[int, int], stored: int | None = None, **more: Any) -> ShardLayout:
    return ShardLayout((("c", ColumnLayout(field, rows, rows if stored is None else stored, buffers, **more)),))


def _read_everything(layout: ShardLayout, memory: np.ndarray[Any, Any]) -> None:
    held = LocalMemory(memory.copy())
    rows = RowIndices.range(0, layout.columns[0][1].rows)
    batch = Batch(
        {name: of_pieces(name, column.field, [StoredPiece(column, held, rows)]) for name, column in layout.columns}
    )
    for column in batch.values():
        column.to_list()
        column.numpy()
        column.arrow()


@each_case(
    "layout",
    [
        pytest.param(ShardLayout(()), id="no columns"),
        pytest.param(_column(Field("dense", "float32"), 4, (0, 12)), id="too few bytes"),
        pytest.param(_column(Field("dense", "float32"), 4, (0, 20)), id="too many bytes"),
        pytest.param(_column(Field("dense", "float32"), 4, (4, 16)), id="not aligned"),
        pytest.param(_column(Field("dense", "float32"), 4, (-64, 16)), id="before the extent"),
        pytest.param(_column(Field("dense", "float32"), 4), id="no buffer"),
        pytest.param(_column(Field("dense", "float32"), 4, (0, 16), (64, 16)), id="one buffer more"),
        pytest.param(_column(Field("dense", "float32"), -1, (0, -4)), id="negative rows"),
        pytest.param(_column(Field("dense", "float32"), 1 << 62, (0, (1 << 63) - 1)), id="overflowing rows"),
        pytest.param(_column(Field("dense", "float32", (1 << 40, 0, 1 << 40)), 1, (0, 0)), id="overflowing shape"),
        pytest.param(_column(Field("dense", "float32", (0, 1 << 40)), 1 << 40, (0, 0)), id="overflowing product"),
        pytest.param(_column(Field("dense", "float32", (-1,)), 1, (0, 4)), id="negative shape"),
        pytest.param(_column(Field("dense", "float32", (None,)), 1, (0, 4)), id="dense that varies"),
        pytest.param(_column(Field("dense", "O"), 1, (0, 8)), id="no such dtype"),
        pytest.param(_column(Field("dense", ""), 1, (0, 8)), id="no dtype"),
        pytest.param(_column(Field("dense", "int8", (1,) * 33), 1, (0, 1)), id="too many dimensions"),
        pytest.param(_column(Field("ragged", "int64", (3,)), 1, (0, 16), (64, 0)), id="ragged that does not vary"),
        pytest.param(_column(Field("ragged", "int64", (3, None)), 1, (0, 16), (64, 0)), id="varying last"),
        pytest.param(_column(Field("ragged", "int64", (None,)), 1, (0, 16), (64, 7)), id="half an item"),
        pytest.param(_column(Field("text", "int8"), 1, (0, 16), (64, 0)), id="text with a dtype"),
        pytest.param(_column(Field("text"), 1, (0, 16), (64, 0), stored=2), id="stored without an index"),
        pytest.param(_column(Field("struct", children=(("a", Field("text")),)), 1, (0, 1)), id="no child"),
        pytest.param(ShardLayout(_column(Field("text"), 0, (0, 8), (64, 0)).columns * 2), id="one name twice"),
    ],
)
def test_an_invalid_layout_is_refused(layout: ShardLayout) -> None:
    with pytest.raises(Corrupt):
        check_layout(layout.encode(), 4096)


@given(st.data())
def test_a_layout_with_a_wrong_byte_is_refused_or_can_be_read(data: st.DataObject) -> None:
    layout, memory = _shard()
    raw = bytearray(layout.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        mutated = check_layout(bytes(raw), len(memory)).layout
        check_contents(mutated, memory)
    except DataplaneError:
        return
    if max(column.rows for _, column in mutated.columns) <= 64:
        with contextlib.suppress(Corrupt):
            _read_everything(mutated, memory)


@given(st.data())
def test_altered_tables_in_shard_contents_are_corrupt_or_readable(data: st.DataObject) -> None:
    layout, memory = _shard()
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(memory) // 8 - 1)) * 8
        word = data.draw(st.one_of(st.integers(-4, 40), st.sampled_from([-(2**63), 2**63 - 1, 2**62, 2**61])))
        memory[place : place + 8] = np.frombuffer(word.to_bytes(8, "little", signed=True), np.uint8)
    try:
        check_contents(layout, memory)
        trusted = True
    except Corrupt:
        trusted = False
    try:
        _read_everything(layout, memory)
        assert trusted, "a reader believed what the check refused"
    except Corrupt:
        pass  # an object that is none, text that is not UTF-8: values, which the check does not read


EMPTY = {
    "dense rows": _column(Field("dense", "int8", (1 << 25, 0)), 1, (0, 0)),
    "many dense rows": _column(Field("dense", "int8", (0,)), 1 << 25, (0, 0)),
    "items": _column(Field("ragged", "int8", (None, 0)), 1, (0, 16), (64, 0)),
    "shapes": _column(Field("ragged", "int8", (None, None)), 1, (64, 16), (64, 0), (128, 16)),
}


@each_case("what", EMPTY)
def test_rows_that_take_no_bytes_are_bounded(what: str) -> None:
    """As plain values they take memory all the same: 2^60 empty lists, of an offset of 8 bytes."""
    layout, memory = EMPTY[what], aligned_bytes(192)
    words = memory.view(np.int64)
    words[:] = 0
    words[1] = 1 << 60  # items
    words[16:18] = 1 << 30, 0  # a shape
    with pytest.raises(Corrupt):
        check_layout(layout.encode(), len(memory))
        check_contents(layout, memory)
    with pytest.raises(Corrupt):  # many at once, and read in one pass
        found = check_layouts([layout.encode()] * 8, [len(memory)] * 8)
        table = np.array([each.numbers for each in found])
        _ = Stack(found[0].outline, table, Scattered.of([memory] * 8)).column("c", 0).tables


def test_a_column_reads_by_the_tables_it_has_checked() -> None:
    layout, memory = _shard()
    column = dict(layout.columns)["ragged"]
    read = of_pieces("ragged", column.field, [StoredPiece(column, LocalMemory(memory), RowIndices.range(0, 4))])
    assert [len(row) for row in read.numpy()] == [2, 0, 3, 1]
    memory.setflags(write=True)
    memory[column.buffers[0][0] :][:40] = 255
    assert [len(row) for row in read.numpy()] == [2, 0, 3, 1]


class Changing(LocalMemory):
    """Memory that somebody fills with other bytes, after so many reads."""

    def __init__(self, data: np.ndarray[Any, Any], reads: int, seed: int) -> None:
        super().__init__(data)
        self._left, self._seed = reads, seed

    def read(self, offset: int, nbytes: int) -> np.ndarray[Any, Any]:
        if not self._left:
            words = np.random.default_rng(self._seed).choice([-1, 0, 1, 3, 1 << 40, 1 << 62], len(self._data) // 8)
            self._data.setflags(write=True)
            self._data[:] = words.view(np.uint8)
        self._left -= 1
        return super().read(offset, nbytes)


@each_case("name", [name for name, _ in _shard()[0].columns])
def test_bytes_changed_during_a_read_cause_wrong_values_or_corrupt_only(name: str) -> None:
    layout, memory = _shard()
    column = dict(layout.columns)[name]
    for reads in range(12):
        for seed in range(6):
            changing = Changing(memory.copy(), reads, seed)
            read = of_pieces(name, column.field, [StoredPiece(column, changing, RowIndices.range(0, 4))])
            for look in (read.to_list, read.numpy, read.arrow):
                with contextlib.suppress(Corrupt):
                    assert len(look()) == 4


# Many shards that lie alike: checked together, read in one pass, as strictly as one by one.


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
        column = Column(name, stacked.layout.field, [Selection(stacked, RowIndices.range(0, stacked.layout.rows))])
        expected = [row for each in given for row in local_batch(each)[name].to_list()]
        assert column.to_list() == expected, name
        backwards = np.arange(len(column))[::-1].copy()
        assert Column(name, stacked.layout.field, column._selections, backwards).to_list() == expected[::-1], name


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
