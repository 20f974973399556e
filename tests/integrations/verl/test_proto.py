"""`RemoteProto`: each operation of a DataProto, compared with verl's own on the same rows."""

from __future__ import annotations

import copy
import datetime
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto

import dataplane as dp
from dataplane.errors import Freed, Misuse, SchemaMismatch
from dataplane.integrations.rows import LazyRow, put_rows
from dataplane.integrations.verl.proto import RemoteProto, put, same
from tests.integrations.marks import SYSTEMS
from tests.integrations.verl.driving import alone
from tests.integrations.verl.inputs import EXTRAS, file, look, messages, opened
from tests.integrations.verl.protos import assert_same, image, objects, proto

pytestmark = SYSTEMS


@pytest.fixture(scope="module")
def plane() -> Iterator[dp.Plane]:
    with alone(dp.NodeConfig(memory="256MiB", spill=0, prewarm=0)) as made:
        yield made


def sent(remote: RemoteProto) -> RemoteProto:
    """As it arrives in another process."""
    arrived = pickle.loads(pickle.dumps(remote))
    assert isinstance(arrived, RemoteProto)
    return arrived


def test_every_kind_of_column_round_trips(plane: dp.Plane) -> None:
    remote = put(proto())
    assert len(remote) == 8
    assert_same(remote.get(), proto())
    assert_same(sent(remote).get(), proto())
    assert_same(remote.get(["log_probs", "uid"]), proto().select(["log_probs"], ["uid"]))
    assert put(remote) is remote


ARRAYS: dict[str, Any] = {
    "times": np.array(["NaT", "2020-01-01", "2021-01-01"], "datetime64[ns]"),
    "durations in two dimensions": np.arange(6).reshape(3, 2).astype("timedelta64[ms]"),
    "text": np.array(["a", "bcd", ""]),
    "wide text in two dimensions": np.array([["a", "bcd"], ["b", "c"], ["", ""]], "U8"),
    "bytes in two dimensions": np.array([[b"a"], [b"b"], [b"ccc"]]),
    "records": np.array([(1, 2.0, "x"), (3, 4.0, ""), (5, 6.0, "yz")], [("a", "i4"), ("b", "f8"), ("c", "U3")]),
    "records in two dimensions": np.array([[(1, 2.0)] * 2] * 3, [("a", "i4"), ("b", "f8")]),
    "records of arrays": np.array([([1, 2],)] * 3, [("a", "i4", (2,))]),
    "raw bytes": np.array([b"ab", b"\0c", b"d\0"], "V2"),
    "the other byte order": np.arange(3).astype(">f4"),
    "halves": np.arange(6).astype("f2").reshape(3, 2),
    "flags": np.array([True, False, True]),
    "objects in two dimensions": np.array([["a", 1], ["b", {1}], [datetime.date(2020, 1, 2), None]], object),
    "objects": objects([value() for value in EXTRAS.values()]),
    "images": objects([opened(file()), opened(file("JPEG", size=64)), None]),
    "prompts with images": objects([messages(opened(file(size=64))) for _ in range(3)]),
    "multi_modal_data": objects([{"image": [opened(file(seed=row))], "n": row} for row in range(3)]),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_any_kind_round_trips(plane: dp.Plane, name: str) -> None:
    array = ARRAYS[name]
    remote = put(DataProto.from_dict(tensors={"t": torch.ones(len(array))}, non_tensors={"x": array}))
    assert look(sent(remote).get().non_tensor_batch["x"]) == look(array)
    assert look(remote[np.array([2, 0])].get().non_tensor_batch["x"].tolist()) == look(array[[2, 0]].tolist())
    twice = RemoteProto.concat([remote, remote]).get().non_tensor_batch["x"]
    assert look(twice) == look(np.concatenate([array, array]).astype(array.dtype))
    remote.free()


def _reordered(data: DataProto) -> DataProto:
    data.reorder(torch.arange(7, -1, -1))
    return data


def _padded(data: DataProto) -> DataProto:
    data.padding(3)
    return data


def _without(data: DataProto) -> DataProto:
    data.pop(["mask"], ["uid"], ["temperature"])
    return data


def _assigned(data: DataProto) -> DataProto:
    data.batch["input_ids"] = torch.zeros(8, 2)
    data.batch["advantages"] = torch.ones(8)
    data.non_tensor_batch["uid"] = objects([f"u{row}" for row in range(8)])
    data.non_tensor_batch.update({"extra": objects([None] * 8)})
    data.batch.pop("mask")
    del data.non_tensor_batch["table"]
    return data


OPERATIONS: dict[str, Callable[[DataProto], DataProto]] = {
    "slice": lambda d: d[2:5],
    "slice with a step": lambda d: d[::-1] if isinstance(d, RemoteProto) else d[list(range(7, -1, -1))],
    "slice by name": lambda d: d.slice(1, None, 2),
    "list": lambda d: d[[3, 1, 1]],
    "list of flags": lambda d: d[[True, False] * 4],
    "tensor": lambda d: d.select_idxs(torch.tensor([3, -1])),
    "no rows": lambda d: d.select(["mask"], ["uid", "multi_modal_inputs"])[:0],
    "chunk": lambda d: d.chunk(4)[1],
    "split": lambda d: d.split(3)[2],
    "repeat": lambda d: d.repeat(3),
    "repeat as a whole": lambda d: d.repeat(3, interleave=False),
    "sample_level_repeat": lambda d: d.sample_level_repeat([1, 2, 0, 1, 1, 1, 1, 3]),
    "select both": lambda d: d.select(["mask"], ["uid"], ["temperature"]),
    "select no tensor": lambda d: d.select([], ["uid", "not there"]),
    "pop": lambda d: d.pop(["mask"], ["uid"], ["temperature"]),
    "pop others": lambda d: d.pop(non_tensor_batch_keys=["uid"]),
    "what pop leaves": _without,
    "rename": lambda d: d.rename("mask", "response_mask"),
    "concat": lambda d: type(d).concat([d, d[:2]]),
    "concat with no rows": lambda d: type(d).concat([d[:0], d[1:], d[:0]]),
    "concat by verl's name": lambda d: DataProto.concat([d, d[5:]]),
    "pad": lambda d: pad_dataproto_to_divisor(d, 6)[0],
    "unpad": lambda d: unpad_dataproto(d, 2),
    "padding": _padded,
    "reorder": _reordered,
    "union": lambda d: d.union(proto().select(["mask"], ["uid"], ["temperature"]).rename("mask", "other")),
    "union of what is there": lambda d: d.union(proto().select(["mask"], ["uid", "mixed"])),
    "assign": _assigned,
    "all of them": lambda d: d.repeat(2)[[5, 1, 9, 9]].chunk(2)[1].repeat(3),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_agree_with_verl_and_move_no_bytes(plane: dp.Plane, name: str) -> None:
    expected = OPERATIONS[name](proto())
    remote = put(proto())
    before = plane.stats().put_bytes
    got = OPERATIONS[name](remote)
    assert isinstance(got, RemoteProto)
    if name not in ("union", "assign"):
        assert plane.stats().put_bytes == before
    assert_same(got.get(), expected)
    assert_same(sent(got).get(), expected)


def test_a_union_does_not_read_columns_stored_identically(plane: dp.Plane) -> None:
    remote = put(proto())
    more = remote.select(["mask"], ["multi_modal_inputs"]).union(
        put(proto().select(["input_ids"], []).rename("input_ids", "a"))
    )
    plane.free(remote.select([], ["multi_modal_inputs"]).ref)  # it can not be read, and is not
    joined = remote.union(more)
    assert list(joined.batch or ()) == ["input_ids", "log_probs", "mask", "position_ids", "a"]


@pytest.mark.parametrize("kind", ["datetime64[ns]", "timedelta64[s]"])
def test_a_union_treats_equal_missing_times_as_equal(plane: dp.Plane, kind: str) -> None:
    times = DataProto.from_dict(non_tensors={"at": np.array(["NaT", 1], kind)})
    assert look(put(times).union(times).get().non_tensor_batch["at"]) == look(times.non_tensor_batch["at"])


@pytest.mark.parametrize(
    ("what", "operation"),
    [
        ("equal chunks", lambda d: d.chunk(3)),
        ("not the same", lambda d: d.union(DataProto.from_dict(tensors={"mask": torch.zeros(8, 4).bool()}))),
        ("not the same", lambda d: d.union(put(DataProto.from_dict(tensors={"mask": torch.zeros(8, 4).bool()})))),
        ("rows", lambda d: d.union(DataProto.from_dict(tensors={"new": torch.zeros(7)}))),
        ("no column 'nothing'", lambda d: d.select(["nothing"])),
        ("no column 'nothing'", lambda d: d.pop(non_tensor_batch_keys=["nothing"])),
        ("not there", lambda d: RemoteProto.concat([d, d.select(["mask"])])),
        ("number each", lambda d: d.sample_level_repeat([1, 2])),
        ("8 rows|has 7", lambda d: d.batch.__setitem__("new", torch.zeros(7))),
        ("rename one", lambda d: d.batch.__setitem__("uid", torch.zeros(8))),
        ("nothing to concatenate", lambda d: RemoteProto.concat([])),
        ("no column of dicts", lambda d: d.get(["uid"], lazy=["uid"])),
    ],
)
def test_assertions_of_verl_are_typed_errors(plane: dp.Plane, what: str, operation: Callable[[Any], Any]) -> None:
    with pytest.raises((Misuse, SchemaMismatch), match=what):
        operation(put(proto()))


@pytest.mark.parametrize(
    "other",
    [
        DataProto.from_dict(tensors={"new": torch.zeros(7)}),
        DataProto.from_dict(tensors={"new": torch.zeros(8)}, meta_info={"temperature": 2.0}),
    ],
    ids=["other rows", "other meta_info"],
)
def test_a_union_that_fails_stores_nothing(plane: dp.Plane, other: DataProto) -> None:
    remote = put(proto())
    before, meta_info = plane.stats().put_bytes, dict(remote.meta_info)
    with pytest.raises((SchemaMismatch, AssertionError)):
        remote.union(other)
    assert plane.stats().put_bytes == before
    assert remote.meta_info == meta_info


def test_a_pickled_remote_proto_is_small_for_any_number_of_rows(plane: dp.Plane) -> None:
    remote = put(proto()).repeat(1024)
    assert len(remote) == 8192
    assert len(pickle.dumps(remote)) < 2048
    assert all(len(pickle.dumps(part)) < 2048 for part in remote.chunk(8))


def test_responses_of_a_prompt_are_stored_once(plane: dp.Plane) -> None:
    rows = [image(prompt, 256) for prompt in range(4)]
    several = objects([{**rows[row // 8]} for row in range(32)])
    before = plane.stats().put_bytes
    remote = put(DataProto.from_dict(non_tensors={"multi_modal_inputs": several}))
    stored = plane.stats().put_bytes - before
    assert stored < 1.05 * sum(row["pixel_values"].nbytes for row in rows)
    read = remote.get().non_tensor_batch["multi_modal_inputs"]
    assert len({row["pixel_values"].data_ptr() for row in read}) == 4


def test_lazy_rows_are_put_and_read_without_storing_them_again(plane: dp.Plane) -> None:
    rows: list[Any] = [image(1), None, {}, image(2)]
    handles = put_rows(rows)
    before = plane.stats().put_bytes
    remote = put(DataProto.from_dict(non_tensors={"multi_modal_inputs": objects(handles)}))
    assert plane.stats().put_bytes - before <= 4096  # a page, for the row that is None
    assert same(list(remote.get().non_tensor_batch["multi_modal_inputs"]), rows)
    lazy = remote.repeat(2).get(lazy=["multi_modal_inputs"]).non_tensor_batch["multi_modal_inputs"]
    assert all(isinstance(row, LazyRow) for row in lazy)
    assert same(dict(lazy[6].items()), rows[3])


def test_one_row_of_a_remote_proto_is_a_verl_item(plane: dp.Plane) -> None:
    item, expected = put(proto())[-2], proto()[6]
    assert item.non_tensor_batch["uid"] == expected.non_tensor_batch["uid"]
    assert torch.equal(item.batch["input_ids"], expected.batch["input_ids"])
    with pytest.raises(IndexError):
        put(proto())[8]
    with pytest.raises(TypeError):
        put(proto())["uid"]


def test_a_nested_tensor_stays_one(plane: dp.Plane) -> None:
    rows = [torch.arange(length) for length in (3, 1, 4)]
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    read = put(DataProto.from_dict(tensors={"tokens": nested}))[[2, 0]].get().batch["tokens"]
    assert read.is_nested
    assert same(list(read.unbind()), [rows[2], rows[0]])


def test_names_are_known_without_reading(plane: dp.Plane) -> None:
    remote = put(proto())
    remote.free()
    assert remote.batch is not None
    assert "mask" in remote.batch
    assert remote.batch.batch_size == torch.Size([8])
    assert "mask" in remote.batch.keys()  # noqa: SIM118
    assert "multi_modal_inputs" in remote.non_tensor_batch
    assert "mask" in repr(remote.batch)
    assert "mask: dense bool [4]" in remote.get_data_info()
    remote.print_size()
    with pytest.raises(KeyError, match="there are"):
        remote.batch["nothing"]
    with pytest.raises(Freed):
        remote.get(["mask"])


def test_device_moves_and_iteration_read_the_rows(plane: dp.Plane) -> None:
    remote = put(proto())
    assert_same(remote.to("cpu"), proto())
    there = remote.to("meta")
    assert {tensor.device.type for tensor in there.batch.values()} == {"meta"}
    assert there.non_tensor_batch.keys() == proto().non_tensor_batch.keys()
    assert {tensor.device.type for tensor in remote.get(["mask"], device="meta").batch.values()} == {"meta"}
    assert len(list(remote.make_iterator(4, 2))) == 4
    assert set(put(proto().select(["mask"], ["uid"])).to_tensordict().keys()) >= {"mask", "uid"}


def test_a_remote_proto_may_have_only_meta_info(plane: dp.Plane) -> None:
    results = [put(DataProto(meta_info={"metrics": {"loss": rank}, "same": 1})) for rank in range(2)]
    joined = DataProto.concat(results)
    assert len(joined) == 0
    assert joined.meta_info == {"metrics": {"loss": [0, 1]}, "same": 1}
    assert_same(sent(results[0]).get(), DataProto(meta_info={"metrics": {"loss": 0}, "same": 1}))


def test_a_copy_shares_rows_and_not_meta_info(plane: dp.Plane) -> None:
    remote = put(proto())
    copied = copy.deepcopy(remote)
    assert copied == remote
    copied.meta_info["more"] = 1
    copied.pop(["mask"])
    assert "more" not in remote.meta_info
    assert "mask" in (remote.batch or ())


def test_a_scope_is_inherited_by_derived_protos(plane: dp.Plane) -> None:
    remote = sent(put(proto(), scope="step-1"))[:4]
    remote.batch["advantages"] = torch.ones(4)  # type: ignore[index]
    plane.free(scope="step-1")
    with pytest.raises(Freed):
        remote.get(["advantages"])


@pytest.mark.parametrize("first", [False, True])
def test_a_proto_concatenated_with_a_stored_one_is_put_in_its_scope(plane: dp.Plane, *, first: bool) -> None:
    stored = put(proto(), scope="step-2")
    joined = DataProto.concat([stored, proto()] if first else [proto(), stored])
    assert joined.scope == "step-2"
    plane.free(scope="step-2")
    for half in joined.chunk(2):
        with pytest.raises(Freed):
            half.get(["mask"])


def test_a_column_that_would_need_a_pickle_is_refused_by_name(plane: dp.Plane) -> None:
    with pytest.raises(SchemaMismatch, match="images"):
        put(DataProto.from_dict(non_tensors={"images": objects([object()])}))
