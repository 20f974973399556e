"""The algebra of references, against lists of labels: which stored row each row is."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from dataplane.batch import locations
from dataplane.batch.concat import concat
from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.batch.ref import BatchRef
from dataplane.errors import LimitExceeded, Misuse, ProtocolMismatch
from tests.cases import each_case

NODE = bytes(range(8))

IDS = Field("ragged", "int64", (None,))
MASK = Field("dense", "float32", (4,))
PIXELS = Field("ragged", "float32", (None, 1176))
TEXT = Field("text")

#: What verl moves for a multimodal batch.
VERL: list[tuple[str, Field, int]] = [
    *((name, IDS, 9_437_184) for name in ("prompts", "responses", "input_ids", "position_ids")),
    *((name, IDS, 4_718_592) for name in ("attention_mask", "response_mask")),
    *((name, Field("ragged", "float32", (None,)), 4_718_592) for name in ("old_log_probs", "ref_log_prob")),
    ("advantages", Field("ragged", "float32", (None,)), 4_718_592),
    ("pixel_values", PIXELS, 4_932_501_504),
    ("image_grid_thw", Field("dense", "int64", (1, 3)), 24_576),
    ("uid", TEXT, 36_864),
    ("reward_model", Field("struct", children=(("style", TEXT), ("ground_truth", TEXT))), 20_480),
]


def verl_ref(rows: int = 1024, shard: int = 77, node: bytes = NODE) -> BatchRef:
    return ref_to(node, rows, [(name, field, size, shard, k) for k, (name, field, size) in enumerate(VERL)])


def one(rows: int = 10, shard: int = 1, name: str = "x", node: bytes = NODE, field: Field = MASK) -> BatchRef:
    return ref_to(node, rows, [(name, field, rows * 16, shard, 0)])


Label = tuple[bytes, int, int, int]


def labels(ref: BatchRef, name: str) -> list[Label]:
    """Which stored row each row of a column is, by both ways of reading; they must agree."""
    plain = [(p.node, p.shard, p.ordinal, row) for p in locations.pieces(ref, name) for row in p.rows.array().tolist()]
    sources, order = locations.sources(ref, name)
    listed = [(p.node, p.shard, p.ordinal, row) for p in sources for row in p.rows.array().tolist()]
    assert plain == (listed if order is None else [listed[i] for i in order.tolist()])
    return plain


def copy(ref: BatchRef) -> BatchRef:
    return pickle.loads(pickle.dumps(ref))  # type: ignore[no-any-return]


class TestValue:
    def test_a_reference_to_invalid_columns_is_refused(self) -> None:
        for node, rows, columns in [
            (b"short", 1, [("x", MASK, 16, 1, 0)]),
            (NODE, -1, [("x", MASK, 16, 1, 0)]),
            (NODE, 1, []),
            (NODE, 1, [("x", MASK, 16, 1, 0), ("x", MASK, 16, 1, 1)]),
        ]:
            with pytest.raises(ValueError, match=r"rows|column"):
                ref_to(node, rows, columns)


class TestBytes:
    @given(st.data())
    def test_altered_reference_bytes_are_refused_or_decode_consistently(self, data: st.DataObject) -> None:
        whole = concat([verl_ref(40).select("uid", "pixel_values"), verl_ref(40, 3).select("uid", "pixel_values")])
        cut = whole.slice_rows("pixel_values", 0, np.arange(80)).share_rows("pixel_values", 1, 2)
        several = [whole, whole[[3, 70, 5, 41]], whole[::-1], whole[np.arange(80) % 7 * 11], cut]
        good = data.draw(st.sampled_from(several))
        mutated = bytearray(good.encode())
        for _ in range(data.draw(st.integers(1, 4))):
            mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
        try:
            ref = BatchRef.decode(mutated[: data.draw(st.integers(0, len(mutated)))])
        except ProtocolMismatch:
            return
        assert len(ref) == len(ref[:]) >= 0
        assert BatchRef.decode(ref.encode()) == ref
        assert ref.nbytes >= 0
        repr(ref), ref.shards(), hash(ref)
        for name in ref.columns:
            assert sum(len(piece.rows) for piece in locations.pieces(ref[:100], name)) == min(len(ref), 100)

    @each_case(
        "change",
        [
            {0: 2}, {1: 11}, {1: -1}, {2: [b"short"]}, {3: [[1, 1, 10]]}, {3: [[0, 1, 0]]}, {3: [[0, 1, 9]]},
            {3: [[0, 1, 2**63]]}, {3: [[0, -1, 10]]}, {4: [["dense", "no such type", [4]]]},
            {4: [["dense", "float32", [-1]]]}, {4: [["mystery", "", []]]}, {5: []},
            {5: [["x", 0, 0, 0], ["x", 0, 0, 0]]}, {5: [["x", 1, 0, 0]]}, {5: [["x", 0, 1, 0]]},
            {5: [["x", 0, 0, 1]]}, {5: [["x", 0, 0, -1]]}, {6: []},
            {6: [[[[0, [0], [160], [0, 9, b""]]], None]]}, {6: [[[[0, [0], [160], [1, 11, b""]]], None]]},
            {6: [[[[0, [0], [160], [-1, 9, b""]]], None]]},
            {6: [[[[0, [0], [160], [0, 2**64 - 1, b""]]], None]]},
            {6: [[[[0, [0, 1], [160], [0, 10, b""]]], None]]}, {6: [[[[1, [0], [160], [0, 10, b""]]], None]]},
            {6: [[[[[0, 0], [0], [160], [0, 10, b""]]], None]]},
            {6: [[[[0, [0], [-160], [0, 10, b""]]], None]]}, {6: [[[[0, [0], [160], [0, 10, b"X123"]]], None]]},
            {6: [[[[0, [0], [160], [0, 10, b"H123"]]], None]]},
            {6: [[[[0, [0], [160], [0, 10, b""]]], [0, 11, b""]]]},
            {6: [[[[0, [0], [160], [0, 10, b""]]], [0, 10, b"B" + bytes(10)]]]},
            {6: [[[[0, [0], [160], [0, 10, b""]]], [0, 2**64 - 1, b""]]]}, {6: [[[], None]]},
            {6: [[[], [0, 10, b""]]]}, {6: [[[[0, [0], [160], [0, 10, b""]]], None, [0, 11, b""]]]},
        ],
        ids=repr,
    )  # fmt: skip
    def test_an_encoded_reference_with_any_invalid_field_is_refused(self, change: dict[int, Any]) -> None:
        import msgspec

        honest = msgspec.msgpack.decode(one().encode())
        assert BatchRef.decode(msgspec.msgpack.encode(honest)) == one()
        for place, value in change.items():
            honest[place] = value
        with pytest.raises(ProtocolMismatch):
            BatchRef.decode(msgspec.msgpack.encode(honest))

    def test_a_reference_of_another_format_version_is_refused(self) -> None:
        encoded = bytearray(one().encode())
        encoded[1] = 9
        with pytest.raises(ProtocolMismatch) as caught:
            BatchRef.decode(encoded)
        assert (caught.value.ours, caught.value.theirs) == ("3", "9")


@dataclass
class Model:
    ref: BatchRef
    columns: dict[str, list[Label]]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def check(self) -> None:
        assert len(self.ref) == len(self)
        assert self.ref.columns == tuple(self.columns)
        for name, expected in self.columns.items():
            assert labels(self.ref, name) == expected
        meant = {label for column in self.columns.values() for label in column}
        found = {
            (node, shard, ordinal, row)
            for (node, shard), several in locations.footprint(self.ref).items()
            for ordinals, rows in several
            for ordinal in ordinals
            for row in rows.array().tolist()
        }
        assert found == meant
        assert self.ref.nbytes == 16 * sum(len(column) for column in self.columns.values())
        assert copy(self.ref) == self.ref

    def rows(self, ref: BatchRef, picked: list[int]) -> Model:
        return Model(ref, {name: [column[i] for i in picked] for name, column in self.columns.items()})


ROWS = (0, 1, 17, 60)  # of the shards that a model starts from, and their numbers


def stored(shard: int, rows: int, names: tuple[str, ...] = ("a", "b")) -> Model:
    """Columns in the given order, `a` at ordinal 0 and so on."""
    places = [(name, "abc".index(name)) for name in names]
    ref = ref_to(NODE, rows, [(name, MASK, rows * 16, shard, place) for name, place in places])
    return Model(ref, {name: [(NODE, shard, place, row) for row in range(rows)] for name, place in places})


@st.composite
def models(draw: st.DrawFn, depth: int = 6) -> Model:
    model = draw(st.sampled_from(ROWS).map(lambda rows: stored(rows, rows)))
    for _ in range(draw(st.integers(0, depth))):
        model = draw(st.sampled_from(STEPS))(draw, model)
    return model


def _slice(draw: st.DrawFn, model: Model) -> Model:
    chosen = draw(st.slices(len(model)))
    return model.rows(model.ref[chosen], list(range(len(model)))[chosen])


def _index(draw: st.DrawFn, model: Model) -> Model:
    if not len(model):
        return model
    rows = draw(st.lists(st.integers(-len(model), len(model) - 1), max_size=80))
    return model.rows(model.ref[rows], rows)


def _shuffle(draw: st.DrawFn, model: Model) -> Model:
    rows = np.random.default_rng(draw(st.integers(0, 9))).permutation(len(model))
    return model.rows(model.ref[rows], rows.tolist())


def _mask(draw: st.DrawFn, model: Model) -> Model:
    flags = draw(st.lists(st.booleans(), min_size=len(model), max_size=len(model)))
    return model.rows(model.ref[np.array(flags, dtype=bool)], [i for i, flag in enumerate(flags) if flag])


def _repeat(draw: st.DrawFn, model: Model) -> Model:
    times = draw(st.integers(0, 3)) if len(model) < 200 else 1
    return model.rows(model.ref.repeat(times), [i for i in range(len(model)) for _ in range(times)])


def _concat(draw: st.DrawFn, model: Model) -> Model:
    parts = [model]
    for _ in range(draw(st.integers(1, 3))):
        other = draw(st.sampled_from(ROWS).map(lambda rows: stored(rows, rows, tuple(model.columns))))
        parts.append(draw(st.sampled_from([_slice, _index, _shuffle]))(draw, other))
    if draw(st.booleans()):
        parts.reverse()
    together = {name: [label for part in parts for label in part.columns[name]] for name in model.columns}
    return Model(concat([part.ref for part in parts]), together)


def _cut(draw: st.DrawFn, model: Model) -> Model:
    chunks = model.ref.chunk(draw(st.integers(1, 9)))
    again = concat(chunks)
    assert again == model.ref
    assert hash(again) == hash(model.ref)
    return Model(again, model.columns)


def _union(draw: st.DrawFn, model: Model) -> Model:
    if "c" in model.columns:
        return model
    new = stored(1000 + len(model), len(model), ("c",))
    return Model(model.ref.union(new.ref), {**model.columns, **new.columns})


def _select(draw: st.DrawFn, model: Model) -> Model:
    names = draw(st.permutations(list(model.columns)))
    ref = model.ref.select(*names)
    if draw(st.booleans()) and len(names) > 1:
        ref, names = ref.drop(names[-1]), names[:-1]
    return Model(ref, {name: model.columns[name] for name in names})


STEPS = [_slice, _index, _shuffle, _mask, _repeat, _concat, _cut, _union, _select]


@given(models())
def test_reference_operations_agree_with_lists(model: Model) -> None:
    model.check()


@given(models(), models())
def test_two_refs_are_equal_when_they_mean_the_same(a: Model, b: Model) -> None:
    same = list(a.columns.items()) == list(b.columns.items())
    assert (a.ref == b.ref) == same


@each_case("times", [10**12, 2**62, 2**70, np.int64(2**62)])
def test_an_excessive_repeat_count_is_refused(times: Any) -> None:
    with pytest.raises(LimitExceeded) as caught:
        one(3).repeat(times)
    assert caught.value.asked == 3 * int(times)
    assert len(one(0).repeat(times)) == 0


def test_rows_that_several_parts_repeat_are_stored_once() -> None:
    ref = one(4)
    again = concat([ref, ref[1:], ref[::-1]])
    assert again.stored_nbytes == ref.stored_nbytes == ref.repeat(3).stored_nbytes
    assert concat([ref[:2], ref[3:], ref[:1]]).stored_nbytes == ref[:3].stored_nbytes


def test_no_rows_are_split_into_one_part_without_rows() -> None:
    assert [len(part) for part in one(3)[:0].split(2)] == [0]
    assert [len(part) for part in one(3).split(2)] == [2, 1]


@each_case(
    "mistake",
    [
        lambda ref: ref.with_origin(b"8 bytes.", [1]),
        lambda ref: ref.with_origin(b"8 bytes.", [-1, 0, 1]),
        lambda ref: ref.with_origin(b"8 bytes.", [0.5, 1, 2]),
        lambda ref: ref.with_origin(b"more than 8 bytes", [0, 1, 2]),
        lambda ref: ref.with_origin(b"8 bytes.", [0, 1, 2], -1),
        lambda ref: ref[np.array(1.5)],
        lambda ref: ref[np.array(True)],
        lambda ref: ref[torch.tensor(True)],
        lambda ref: ref.slice_rows("x", 0, torch.zeros(3, dtype=torch.bfloat16)),
        lambda ref: ref.slice_rows("x", 0, [[1], [2, 3]]),
    ],
)
def test_invalid_row_selections_are_misuse(mistake: Callable[[BatchRef], Any]) -> None:
    with pytest.raises(Misuse):
        mistake(one(3))


def test_a_reference_is_encoded_with_the_traces_that_it_has_now() -> None:
    ref = ref_to(bytes(8), 1, [("x", Field("dense", "uint8"), 1, 1, 0)])
    for of in (ref, BatchRef.decode(ref.encode())):
        of.traces = ("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",)
        assert BatchRef.decode(of.encode()).traces == of.traces
