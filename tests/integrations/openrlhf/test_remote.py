"""What is handed to one phase after the other is put once."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dataplane as dp
from dataplane.integrations import process
from dataplane.integrations.openrlhf.remote import RemoteList, SentRows
from dataplane.integrations.rows import put_rows
from tests.integrations.marks import SYSTEMS
from tests.integrations.openrlhf.samples import experience, inputs, same

pytestmark = SYSTEMS


def put_bytes(plane: dp.Plane, work: Callable[[], Any]) -> int:
    before = plane.stats().put_bytes
    work()
    return plane.stats().put_bytes - before


def test_values_passed_to_several_phases_are_put_once(plane: dp.Plane) -> None:
    sent, given = SentRows(plane), [experience(4, 9 + i, seed=i) for i in range(4)]
    sequences, pixels = [each.sequences for each in given], [each.mm_train_inputs for each in given]
    first = RemoteList.of("sequences", sequences, sent)
    RemoteList.of("mm_train_inputs_list", pixels, sent)
    assert put_bytes(plane, lambda: RemoteList.of("sequences", sequences, sent)) == 0
    few = inputs()["pixel_values"].nbytes / 10
    assert put_bytes(plane, lambda: RemoteList.of("mm_train_inputs_list", pixels, sent)) < few / 10  # placeholders
    assert 0 < put_bytes(plane, lambda: RemoteList.of("experience", given, sent)) < few  # what was not there yet
    assert same(list(first), sequences)


@pytest.mark.parametrize(
    "write",
    [
        lambda tensor: tensor.add_(1),
        lambda tensor: tensor.view(-1)[0].fill_(7),
        lambda tensor: setattr(tensor, "data", torch.ones(3, 3)),
        lambda tensor: tensor.t_(),
        lambda tensor: tensor.resize_(2, 2),
    ],
    ids=["in place", "through a view", "other memory", "transposed", "resized"],
)
def test_a_modified_tensor_is_put_again(plane: dp.Plane, write: Callable[[Any], Any]) -> None:
    sent, tensor = SentRows(plane), torch.arange(9.0).view(3, 3)
    before, kept = RemoteList.of("x", [tensor], sent), tensor.clone()
    write(tensor)
    after = RemoteList.of("x", [tensor], sent)
    assert same(before[0], kept)
    assert same(after[0], tensor.contiguous())


def test_modified_pixels_are_put_again(plane: dp.Plane) -> None:
    sent, given = SentRows(plane), inputs()
    RemoteList.of("mm_train_inputs_list", [[given]], sent)
    given["pixel_values"][0] = 0
    assert same(RemoteList.of("mm_train_inputs_list", [[given]], sent)[0][0].read(), given)


def test_tensors_of_inference_mode_are_put_each_time(plane: dp.Plane) -> None:
    sent = SentRows(plane)
    with torch.inference_mode():
        tensor = torch.rand(2, 3)
        RemoteList.of("x", [tensor], sent)
        tensor.fill_(1)  # which torch does not count
        assert RemoteList.of("x", [tensor], sent)[0].tolist() == tensor.tolist()


def test_stored_values_are_freed_with_their_tensors(plane: dp.Plane) -> None:
    sent, given = SentRows(plane), [experience(seed=i) for i in range(3)]
    there = RemoteList.of("experience", given, sent)
    more = RemoteList.of("mm_train_inputs_list", [each.mm_train_inputs for each in given], sent)
    assert plane.stats().memory_used > 0
    kept = given.pop()
    del given
    gc.collect()
    assert process.settle()
    assert same(there[2], there[2])  # one of a put keeps all of it
    del kept, there, more
    gc.collect()
    assert process.settle()
    assert plane.stats().memory_used == 0


def test_values_stored_for_lazy_rows_are_freed_with_them(plane: dp.Plane) -> None:
    handles = [each for each in put_rows([inputs(seed) for seed in range(3)], plane=plane) if each is not None]
    before, rows = plane.stats().memory_used, [each.ref for each in handles]
    there = RemoteList.of("mm_train_inputs_list", [handles[:2], handles[2:]], SentRows(plane))
    assert plane.stats().memory_used > before
    assert same([each.read() for each in there[0]], [inputs(0), inputs(1)])
    del there, handles
    gc.collect()
    assert process.settle()
    assert plane.stats().memory_used == before
    assert len(plane.get(rows[2])) == 1


def test_a_tensor_repeated_in_a_list_is_put_once(plane: dp.Plane) -> None:
    tensor = torch.rand(100, 1000)
    there = RemoteList.of("x", [tensor, tensor[:2], tensor], SentRows(plane))
    assert same(list(there), [tensor, tensor[:2], tensor])
    assert plane.stats().put_bytes < 1.2 * tensor.nbytes


@pytest.mark.parametrize(
    "odd", [torch.rand(2, requires_grad=True), torch.rand(2).to_sparse(), torch.empty(0, 3), {1}, 1]
)
def test_values_that_no_column_can_hold_remain_in_the_list(plane: dp.Plane, odd: Any) -> None:
    there = RemoteList.of("x", [odd, torch.rand(2)], SentRows(plane))
    assert there[0] is odd or same(there[0], odd)


def test_experiences_in_nested_lists_round_trip(plane: dp.Plane) -> None:
    given = [[experience(2, mm_train_inputs=[])], [], [experience(1, mm_train_inputs=[]), None]]
    assert same(list(RemoteList.of("x", given, SentRows(plane))), given)


def test_an_experience_that_is_not_stored_remains_in_the_list_unchanged(plane: dp.Plane) -> None:
    given = [experience(3, 7, seed=i) for i in range(3)]
    given[1].sequences = given[1].sequences.to(torch.float32).requires_grad_()
    there = RemoteList.of("experience", given, SentRows(plane))
    assert [item is given[1] for item in there] == [False, True, False]
    assert there[1] is given[1]
    assert same([there[0].sequences, there[2].sequences], [given[0].sequences, given[2].sequences])


def test_slices_of_a_remote_list_have_the_same_items(plane: dp.Plane) -> None:
    given = [experience(1 + i % 3, 5 + i, seed=i) for i in range(7)]
    there = RemoteList.of("experience", given, SentRows(plane))
    for start, stop in ((0, 7), (2, 5), (6, 9), (3, 3), (-2, None)):
        read = list(there[start:stop])
        for each in read:
            each.mm_train_inputs = [row.read() for row in each.mm_train_inputs]
        assert same(read, given[start:stop])
    assert same(there[1:6][2:3][0].sequences, given[3].sequences)
    with pytest.raises(IndexError):
        there[7]
    with pytest.raises(dp.Misuse):
        there[::2]


def test_booleans_and_numbers_remain_distinct(plane: dp.Plane) -> None:
    given = [True, 1, 1.0, 0, False, "1", None, [True], [1], -0.0, 0.0]
    assert same(list(RemoteList.of("x", given, SentRows(plane))), given)
    assert str(list(RemoteList.of("x", given, SentRows(plane)))) == str(given)
