"""Slices inside rows against a model: of each row the array that slicing it by itself gives."""

from __future__ import annotations

import pickle
import sys
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from dataplane.batch import byte_ranges, cuts, locations
from dataplane.batch.batch import Column
from dataplane.batch.byte_ranges import ByteRanges, merged, rounded, total, without
from dataplane.batch.concat import concat
from dataplane.batch.layout import ShardLayout, aligned_bytes, check_contents
from dataplane.batch.locations import ref_to
from dataplane.batch.put_options import narrowed
from dataplane.batch.put_plan import plan
from dataplane.batch.ref import BatchRef
from dataplane.batch.rows import RowIndices
from dataplane.batch.stored_column import StoredPiece, opened
from dataplane.errors import Corrupt, LimitExceeded, Misuse, SchemaMismatch
from tests.cases import each_case
from tests.unit.batch.exact import LocalMemory, filled, of_pieces, same

NODE = bytes(8)
ROWS = 7
Array = np.ndarray[Any, Any]


def columns(seed: int) -> dict[str, list[Array]]:
    """Rows as a model has them; those of `dense` are all alike, and the others differ in one dimension or in two."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 40, ROWS)
    return {
        "dense": list(random.integers(-3, 100, (ROWS, 12, 3))),
        "routed": [random.integers(0, 200, (n, 5, 2)) for n in lengths],
        "ids": [random.integers(0, 70_000, n) for n in lengths],
        "varying": [random.random((n, 1 + n % 4, 2)).astype(np.float32) for n in lengths],
    }


class Shards:
    def __init__(self) -> None:
        self.layouts: dict[int, ShardLayout] = {}
        self.memories: dict[int, Any] = {}

    def put(self, number: int, columns: dict[str, Any], *, narrow: bool) -> BatchRef:
        given = {name: np.stack(rows) if name == "dense" else rows for name, rows in columns.items()}
        planned = plan(narrowed(given, True) if narrow else given)
        memory = filled(planned)
        self.layouts[number], self.memories[number] = planned.layout(), memory
        told = [(c.name, c.field, c.logical_nbytes, number, i) for i, c in enumerate(planned.columns)]
        return ref_to(NODE, planned.rows, told)

    def read(self, ref: BatchRef, name: str, memories: dict[int, Any] | None = None) -> Column:
        pieces, order = locations.sources(ref, name)
        there = [
            StoredPiece(
                self.layouts[p.shard].columns[p.ordinal][1], LocalMemory((memories or self.memories)[p.shard]), p.rows
            )
            for p in pieces
        ]
        field, cut = ref.schema[name], locations.frame_of(ref, name)[0].cut
        if not cut:
            return of_pieces(name, field, there, order)
        return Column(name, field, opened(name, field, there, cut), order, cut)

    def fetched(self, ref: BatchRef) -> dict[int, Any]:
        """The shards where nothing is there but what a reader of another host has fetched."""
        found = {}
        for (_, number), wanted in locations.wanted(ref).items():
            layout, whole = self.layouts[number], self.memories[number]
            parts = byte_ranges.tables(layout)
            for ordinals, rows, cut in wanted:
                decoded = cuts.decode(cuts.encode(cut), len(rows))
                parts = parts + byte_ranges.values(layout, ordinals, rows, whole, decoded)
            memory = np.full_like(aligned_bytes(len(whole)), 0xFF)
            for start, stop in parts:
                memory[start:stop] = whole[start:stop]
            check_contents(layout, memory)
            found[number] = memory
        return found


def zigzag(row: Array, rank: int, ranks: int, multiple: int, axis: int) -> Array:
    """As Megatron does it: pad, view as 2 x ranks chunks, pick two; and then without what was padding."""
    length = row.shape[axis]
    padded = -(-length // multiple) * multiple
    chunks = np.arange(padded).reshape(2 * ranks, -1)
    chosen = np.concatenate([chunks[rank], chunks[2 * ranks - 1 - rank]])
    found: Array = row.take(chosen[chosen < length], axis=axis)
    return found


def run(row: Array, rank: int, ranks: int, multiple: int, axis: int) -> Array:
    length = row.shape[axis]
    part = -(-length // multiple) * multiple // ranks
    return row.take(np.arange(length)[rank * part : (rank + 1) * part], axis=axis)


ENDS = st.one_of(st.none(), st.integers(-45, 45))
NAMES = ["dense", "routed", "ids", "varying"]


class Model:
    """A reference, and what each of its rows is."""

    def __init__(self, ref: BatchRef, rows: dict[str, list[Array]]) -> None:
        self.ref = ref
        self.rows = rows

    def slice_rows(self, data: Any, name: str) -> None:
        axis = data.draw(st.integers(0, len(self.ref.schema[name].shape) - 1))
        count = len(self.ref)
        ends: list[Any] = []
        for _ in range(2):
            many = st.lists(st.integers(-45, 45), min_size=count, max_size=count)
            ends.append(data.draw(st.one_of(ENDS, many.map(lambda each: np.array(each, np.int64)))))
        self.ref = self.ref.slice_rows(name, axis, *ends)
        for i, row in enumerate(self.rows[name]):
            start, stop = (end if end is None or isinstance(end, int) else int(end[i]) for end in ends)
            self.rows[name][i] = row[(slice(None),) * axis + (slice(start, stop),)]

    def share_rows(self, data: Any, name: str) -> None:
        axis = data.draw(st.integers(0, len(self.ref.schema[name].shape) - 1))
        ranks, zig = data.draw(st.integers(1, 4)), data.draw(st.booleans())
        rank = data.draw(st.integers(0, ranks - 1))
        multiple = ranks * (2 if zig else 1) * data.draw(st.integers(1, 3))
        self.ref = self.ref.share_rows(name, rank, ranks, axis=axis, zigzag=zig, multiple=multiple)
        share = zigzag if zig else run
        self.rows[name] = [share(row, rank, ranks, multiple, axis) for row in self.rows[name]]

    def pick(self, data: Any) -> None:
        if not len(self.ref):
            return
        rows = data.draw(st.lists(st.integers(0, len(self.ref) - 1), min_size=1, max_size=9))
        self.ref = self.ref[rows]
        self.rows = {name: [of[row] for row in rows] for name, of in self.rows.items()}

    def cut(self, data: Any) -> None:
        start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(self.ref))] * 2)))
        self.ref = self.ref[start:stop]
        self.rows = {name: of[start:stop] for name, of in self.rows.items()}

    def repeat(self, data: Any) -> None:
        if len(self.ref) < 20:
            self.ref = self.ref.repeat(2)
            self.rows = {name: [row for row in of for _ in range(2)] for name, of in self.rows.items()}

    def send(self, data: Any) -> None:
        self.ref = pickle.loads(pickle.dumps(self.ref))


def changed(model: Model, data: Any) -> None:
    for _ in range(data.draw(st.integers(0, 5))):
        what = data.draw(st.sampled_from(["slice_rows"] * 3 + ["share_rows"] * 2 + ["pick", "cut", "repeat", "send"]))
        if what in ("slice_rows", "share_rows"):
            getattr(model, what)(data, data.draw(st.sampled_from(NAMES)))
        else:
            getattr(model, what)(data)


@given(st.data())
def test_slices_inside_rows_agree_with_array_slicing(data: Any) -> None:
    shards, models = Shards(), []
    for number in range(data.draw(st.integers(1, 2))):
        rows = columns(number)
        model = Model(shards.put(number, rows, narrow=data.draw(st.booleans())), rows)
        changed(model, data)
        models.append(model)
    fields = [{name: model.ref.schema[name] for name in model.rows} for model in models]
    names = [name for name in NAMES if name != "dense" or len({repr(each[name]) for each in fields}) == 1]
    ref = concat([model.ref.select(*names) for model in models])
    rows = {name: [row for model in models for row in model.rows[name]] for name in names}
    together = Model(ref, rows)
    order = data.draw(st.permutations(range(len(ref))))
    together.ref, together.rows = ref[order], {name: [of[i] for i in order] for name, of in rows.items()}
    memories = shards.fetched(together.ref)
    for name in names:
        for column in (shards.read(together.ref, name), shards.read(together.ref, name, memories)):
            check(column, together.rows[name])


def check(column: Column, rows: list[Array]) -> None:
    assert len(column) == len(rows)
    assert all(same(np.asarray(found), row) for found, row in zip(column.numpy(), rows, strict=True))
    for found, row in zip(column.narrow().numpy(), rows, strict=True):
        np.testing.assert_array_equal(found, row)
    assert column.to_list() == [row.tolist() for row in rows] or not all(row.size for row in rows)
    if column.kind == "ragged":
        lengths = column.lengths()
        assert lengths is not None
        assert lengths.tolist() == [len(row) for row in rows]
    assert column.nbytes == sum(row.nbytes for row in rows)
    half = column[::-2]
    assert all(same(np.asarray(found), row) for found, row in zip(half.numpy(), rows[::-2], strict=True))


def test_contiguous_slices_are_read_in_place() -> None:
    shards = Shards()
    rows = columns(1)
    ref = shards.put(0, rows, narrow=False)
    memory = shards.memories[0]
    last = shards.read(ref.share_rows("routed", 3, 4, zigzag=True), "routed").numpy()  # its two chunks touch
    assert all(np.shares_memory(row, memory) for row in last if row.size)
    tokens = shards.read(ref.slice_rows("ids", 0, 2, -3), "ids").numpy()
    assert all(np.shares_memory(row, memory) and not row.flags.writeable for row in tokens if row.size)
    layers = shards.read(ref.slice_rows("routed", 1, 1, 3), "routed").numpy()
    assert all(np.shares_memory(row, memory) for row in layers if row.size)
    assert np.shares_memory(shards.read(ref.slice_rows("dense", 0, 3, 9), "dense").numpy(), memory)
    narrow = shards.put(1, rows, narrow=True)
    stored = shards.read(narrow.slice_rows("routed", 0, 2), "routed").narrow().numpy()
    assert all(np.shares_memory(row, shards.memories[1]) and row.dtype == np.uint8 for row in stored if row.size)


def test_the_bytes_of_a_slice_are_a_part_of_those_of_its_rows() -> None:
    ref = Shards().put(0, columns(0), narrow=False)
    for name, cut in (("dense", ref.slice_rows("dense", 0, 3, 9)), ("routed", ref.share_rows("routed", 1, 2))):
        assert cut.select(name).nbytes == round(ref.select(name).nbytes / 2)


class TestFields:
    @each_case(
        ("name", "axis", "start", "error"),
        [
            ("dense", 2, 0, SchemaMismatch), ("ids", 1, 0, SchemaMismatch), ("text", 0, 0, SchemaMismatch),
            ("scalar", 0, 0, SchemaMismatch), ("absent", 0, 0, SchemaMismatch), ("ids", 0, 1.5, Misuse),
            ("ids", 0, [1, 2], Misuse), ("ids", 0, ["a"] * ROWS, Misuse), ("ids", "x", 0, Misuse),
        ],
    )  # fmt: skip
    def test_invalid_slices_are_refused(self, name: str, axis: Any, start: Any, error: type[Exception]) -> None:
        more = {"text": ["x"] * ROWS, "scalar": list(range(ROWS))}
        ref = Shards().put(0, columns(0) | more, narrow=False)
        with pytest.raises(error):
            ref.slice_rows(name, axis, start)

    def test_slices_of_slices_are_bounded(self) -> None:
        ref = Shards().put(0, columns(0), narrow=False)
        for _ in range(200):  # slices from the beginning are one
            ref = ref.slice_rows("ids", 0, 0, 30)
        assert len(locations.frame_of(ref, "ids")[0].cut) == 1
        with pytest.raises(LimitExceeded):
            for _ in range(5):
                ref = ref.share_rows("ids", 0, 2, zigzag=True)
        with pytest.raises(LimitExceeded):
            for _ in range(65):
                ref = ref.slice_rows("ids", 0, -1)


class TestTheWire:
    def test_a_field_that_does_not_match_its_slice_is_corrupt(self) -> None:
        shards = Shards()
        ref = shards.put(0, columns(0), narrow=False)
        sliced = ref.slice_rows("dense", 0, 2, 5)
        wrong = BatchRef(len(ref), ref._columns | {"dense": sliced._columns["dense"]}, sliced._frames)
        frame = wrong._frames[wrong._columns["dense"].frame].with_cut((cuts.CutStep(cuts.SLICE, 0, (0, 9)),))
        there = [
            StoredPiece(shards.layouts[0].columns[0][1], LocalMemory(shards.memories[0]), RowIndices.range(0, ROWS))
        ]
        with pytest.raises(Corrupt):
            opened("dense", sliced.schema["dense"], there, frame.cut)


def test_slices_up_to_the_largest_integer_are_encoded() -> None:
    ref = Shards().put(0, {"y": [np.arange(3), np.arange(1)]}, narrow=False)
    for _ in range(2):
        ref = ref.slice_rows("y", 0, sys.maxsize)
    assert len(BatchRef.decode(ref.encode())) == 2


# Ranges of bytes, against the sets of their bytes.

SIZE = 61
RANGES = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)), max_size=8)


def bytes_of(ranges: ByteRanges) -> set[int]:
    return {byte for start, stop in ranges for byte in range(start, stop)}


@given(RANGES, RANGES)
def test_present_ranges_are_subtracted_from_wanted_ranges(wanted: ByteRanges, there: ByteRanges) -> None:
    wanted, there = merged(wanted, 0), merged(there, 0)
    left = without(wanted, there)
    assert bytes_of(left) == bytes_of(wanted) - bytes_of(there)
    assert total(left) == len(bytes_of(left))


@given(RANGES, st.integers(0, 8))
def test_ranges_within_the_gap_are_merged(ranges: ByteRanges, gap: int) -> None:
    found = merged(ranges, gap)
    assert bytes_of(ranges) <= bytes_of(found)
    assert all(after[0] - before[1] > gap for before, after in pairwise(found))


@given(RANGES, st.sampled_from((1, 4, 16)))
def test_rounded_ranges_are_whole_units(ranges: ByteRanges, unit: int) -> None:
    ranges = merged(ranges, 0)
    found = bytes_of(rounded(ranges, unit, SIZE))
    units = {byte // unit for byte in bytes_of(ranges)}
    assert found == {byte for byte in range(SIZE) if byte // unit in units}
