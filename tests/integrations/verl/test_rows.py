"""Handles of rows through what frameworks do with dicts of tensors: verl's, tensordict's, OpenRLHF's and
TransferQueue's own functions."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from verl.protocol import DataProto
from verl.utils.model import extract_multi_modal_inputs

import dataplane as dp
from dataplane.integrations.rows import LazyRow, put_rows
from dataplane.integrations.verl.proto import same
from tests.integrations.marks import SYSTEMS
from tests.integrations.verl.driving import alone
from tests.integrations.verl.protos import image, objects

pytestmark = SYSTEMS


@pytest.fixture(scope="module", autouse=True)
def plane() -> Iterator[dp.Plane]:
    with alone(dp.NodeConfig(memory="64MiB", spill=0, prewarm=0)) as made:
        yield made


def rows() -> list[dict[str, Any] | None]:
    return [image(0), None, image(1, 32), {}, image(2)]


def test_verl_extracts_the_same_from_lazy_rows_as_from_dicts() -> None:
    expected = extract_multi_modal_inputs(rows())
    assert same(extract_multi_modal_inputs(put_rows(rows())), expected)
    assert same(extract_multi_modal_inputs(put_rows(rows()), [0, 2]), extract_multi_modal_inputs(rows(), [0, 2]))


def test_a_key_that_changes_extraction_is_visible_in_lazy_rows() -> None:
    bound = [{**image(0), "image_bound": torch.tensor([[0, 4]])}, image(1)]
    assert same(extract_multi_modal_inputs(put_rows(bound)), extract_multi_modal_inputs(bound))


def test_lazy_rows_pass_through_a_data_proto() -> None:
    handles = put_rows([image(row) for row in range(4)])
    proto = DataProto.from_dict({"index": torch.arange(4)}, {"multi_modal_inputs": handles})
    moved = pickle.loads(pickle.dumps(DataProto.concat(proto.repeat(2).chunk(4))[[6, 0, 2]]))
    back = DataProto.from_tensordict(moved.to_tensordict())
    for each in (moved, back, next(iter(moved.make_iterator(3, 1)))):
        column = each.non_tensor_batch["multi_modal_inputs"]
        assert [type(row) for row in column] == [LazyRow] * 3
        assert same([dict(row.items()) for row in column], [image(3), image(0), image(1)])


def test_a_pickled_column_of_lazy_rows_is_small() -> None:
    handles = put_rows([image(row, 256) for row in range(32)])
    proto = DataProto.from_dict({"index": torch.arange(32)}, {"multi_modal_inputs": objects(handles)})
    assert len(pickle.dumps(proto.non_tensor_batch)) < 32 * 300


def test_transfer_queue_serialization_preserves_lazy_rows() -> None:
    serial = pytest.importorskip("transfer_queue.utils.serial_utils")
    handles = put_rows([image(0), image(1)])
    arrived = serial.MsgpackDecoder().decode(serial.MsgpackEncoder().encode({"rows": handles}))["rows"]
    assert [type(row) for row in arrived] == [LazyRow] * 2
    assert same([dict(row.items()) for row in arrived], [image(0), image(1)])


def test_an_object_array_holds_lazy_rows_unchanged() -> None:
    handles = put_rows([image(0), None, {}])
    assert np.array(handles, dtype=object).shape == (3,)
