"""OpenRLHF's own Experience into the plane and back."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils.vlm_utils import merge_mm_train_inputs

import dataplane as dp
from dataplane.integrations.openrlhf import free, get, put
from dataplane.integrations.rows import LazyRow
from tests.integrations.marks import SYSTEMS
from tests.integrations.openrlhf.samples import experience, inputs, same

pytestmark = SYSTEMS


def back(there: Any, **how: Any) -> Any:
    """What comes back of what another process would get."""
    return get(pickle.loads(pickle.dumps(there)), **how)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sequences": torch.empty(0, 7, dtype=torch.long)},
        {"sequences": torch.empty(3, 0), "rewards": torch.empty(0)},
        {"values": torch.rand(2, 3, 4), "rewards": torch.tensor(1.5), "info": {}},
        {"sequences": torch.arange(12).view(3, 4).t(), "rewards": torch.arange(6.0)[::2]},
        {"info": {"nested": {"kl": torch.rand(2)}, "list": [torch.rand(1), None, 3], "flag": True, "one": 1}},
        {"mm_train_inputs": [inputs(), None, {"pixel_values": torch.rand(2, 3).half(), "sizes": [[1, 2]]}]},
        {"mm_train_inputs": [{"a": torch.rand(2, 2)}, {"a": torch.ones(2, 2, dtype=torch.long)}]},
        {"images": [None], "info": {"cut": torch.tensor([False]), "length": torch.tensor(7), "note": "x"}},
    ],
    ids=["nothing", "no rows", "no columns", "3-d and 0-d", "strides", "info", "inputs", "dtypes", "a rollout's"],
)
def test_several_experiences_round_trip_with_all_fields(plane: dp.Plane, fields: dict[str, Any]) -> None:
    given = [Experience(**fields), experience(), experience(2, 30, seed=1), experience(1, 2, seed=2)]
    assert same(back(put(given)), given)
    assert same(back(put(given[0])), given[0])


def test_tensors_are_read_to_a_device(plane: dp.Plane) -> None:
    read = get(put(experience()), device="meta")
    assert read.sequences.device.type == "meta"
    assert read.sequences.shape == experience().sequences.shape
    assert same(get(put(experience()), device="cpu"), experience())


def test_equal_pixels_are_stored_once(plane: dp.Plane) -> None:
    put([experience(8, seed=0), experience(8, seed=1)])
    pixels = inputs()["pixel_values"].nbytes
    assert 2 * pixels <= plane.stats().put_bytes < 2.2 * pixels


def test_only_the_fields_that_are_asked_for_are_read(plane: dp.Plane) -> None:
    big = torch.rand(4, 200_000)
    given = experience(action_log_probs=big)
    there = put(given)
    read = get(there, fields=["rewards", "index"])
    assert same(read.rewards, given.rewards)
    assert same(read.index, given.index)
    assert read.action_log_probs is None
    assert plane.stats().pinned_bytes < big.nbytes


def test_model_inputs_can_be_read_lazily(plane: dp.Plane) -> None:
    given = experience()
    read = get(put(given), lazy=True)
    assert all(isinstance(each, LazyRow) for each in read.mm_train_inputs)
    assert plane.stats().pinned_bytes < inputs()["pixel_values"].nbytes
    merged = merge_mm_train_inputs(read.mm_train_inputs, "cpu")
    assert same(merged, merge_mm_train_inputs(given.mm_train_inputs, "cpu"))


def test_lazy_rows_among_inputs_remain_lazy(plane: dp.Plane) -> None:
    first = get(put(experience()), lazy=True)
    again = back(put(first), lazy=True)
    assert again.mm_train_inputs == first.mm_train_inputs


def test_a_freed_experience_is_lost_and_values_already_read_remain(plane: dp.Plane) -> None:
    there = put(experience())
    read = get(there)
    free(there)
    free(there)
    assert same(read, experience())
    with pytest.raises(dp.Freed):
        get(there)
    del read
    gc.collect()
    assert plane.stats().memory_used == 0


@pytest.mark.parametrize("large", ["values", "mm_train_inputs"])
def test_an_experience_that_does_not_fit_leaves_nothing(plane: dp.Plane, large: str) -> None:
    values = {"values": torch.zeros(4, 5 << 20), "mm_train_inputs": [inputs(seed, 4096) for seed in range(4)]}
    with pytest.raises(dp.LimitExceeded):
        put(experience(**{large: values[large]}))
    assert plane.stats().memory_used == 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rewards": torch.rand(2, requires_grad=True)}, "rewards"),
        ({"info": {"kl": torch.rand(2, requires_grad=True)}}, "info.kl"),
        ({"values": torch.rand(2, 2).to_sparse()}, "values"),
        ({"prompts": ["a", len]}, "prompts"),
    ],
)
def test_a_field_that_no_column_can_hold_is_refused_by_name(
    plane: dp.Plane, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(dp.SchemaMismatch, match=named):
        put(experience(**fields))
    assert plane.stats().put_bytes == 0


@pytest.mark.parametrize("value", [None, {"sequences": torch.rand(2)}, [torch.rand(2)]])
def test_values_that_are_no_experience_are_misuse(plane: dp.Plane, value: Any) -> None:
    with pytest.raises(dp.Misuse, match="an openrlhf Experience"):
        put(value)
