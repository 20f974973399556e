"""RemoteProtos through verl's own single controller: workers of a real RayWorkerGroup, data-parallel 2 and, in the long
tests, tensor-parallel 2 each, and the dispatch and collect functions of verl as they are."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from verl.protocol import DataProto, DataProtoFuture

import dataplane as dp
from dataplane.errors import DataplaneError, Misuse
from dataplane.integrations import process

with warnings.catch_warnings(action="ignore"):  # verl imports names of Ray's that are deprecated
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

from dataplane.integrations import ray as nodes
from dataplane.integrations.verl.proto import RemoteProto, put
from tests.integrations.marks import SYSTEMS, long
from tests.integrations.verl import protos, workers
from tests.integrations.verl.protos import assert_same, image, objects

pytestmark = SYSTEMS


@pytest.fixture(scope="module", params=[1, *long(2)])
def tensor(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def group(job: None, tensor: int) -> Iterator[Any]:
    nodes.up(dp.NodeConfig(memory="128MiB", spill=0, prewarm=0))
    for module in (protos, workers):  # another package of this environment is called `tests` too
        ray.cloudpickle.register_pickle_by_value(module)
    pool = RayResourcePool([2 * tensor], use_gpu=False, max_colocate_count=1)
    made = RayWorkerGroup(pool, RayClassWithInitArgs(cls=ray.remote(workers.MeshWorker), tensor=tensor))
    yield made
    for worker in made.workers:
        ray.kill(worker)
    for place in pool.pgs:
        ray.util.remove_placement_group(place)


def prompts(rows: int = 8, **how: Any) -> DataProto:
    return DataProto.from_dict(
        tensors={"input_ids": torch.arange(rows * 4).view(rows, 4)},
        non_tensors={
            "uid": objects([f"u{row}" for row in range(rows)]),
            "multi_modal_inputs": objects([image(row // 2) for row in range(rows)]),
        },
        meta_info={"temperature": 1.0},
        **how,
    )


def test_a_worker_mesh_takes_and_returns_references(group: Any, tensor: int) -> None:
    expected = group.forward(prompts())
    assert type(expected) is DataProto
    got = group.forward(put(prompts()))
    assert isinstance(got, RemoteProto)
    assert_same(got.get(), expected)
    assert got.meta_info == {"metrics": {"rank": [0, tensor]}}


def test_ranks_that_are_not_collected_store_nothing(group: Any) -> None:
    remote = put(prompts())
    before = process.plane().stats().shards
    group.forward(remote)
    assert process.plane().stats().shards - before == 2  # of two data-parallel ranks, and not of all workers


def test_pixels_are_read_only_by_the_workers_that_use_them(group: Any) -> None:
    data = prompts()
    remote = put(data)
    before = process.plane().stats().put_bytes
    got = group.pixels(remote).get()
    assert process.plane().stats().put_bytes - before <= 4 * 4096  # small columns alone
    assert set(got.non_tensor_batch["kinds"]) == {"LazyRow"}
    expected = [float(row["pixel_values"].sum()) for row in data.non_tensor_batch["multi_modal_inputs"]]
    assert got.batch["sums"].tolist() == pytest.approx(expected, abs=1e-2)


def test_the_result_of_one_call_is_united_and_passed_to_the_next(group: Any) -> None:
    remote = put(prompts()).repeat(4)
    remote.union(group.forward(remote))
    again = group.every_rank(remote)
    assert torch.equal(again.get().batch["input_ids"], prompts().repeat(4).batch["input_ids"])
    assert remote.non_tensor_batch["seen"].tolist() == remote.non_tensor_batch["uid"].tolist()


def test_a_nonblocking_call_returns_a_future_of_a_reference(group: Any) -> None:
    future = group.later(put(prompts()))
    assert isinstance(future, DataProtoFuture)
    got = future.get()
    assert isinstance(got, RemoteProto)
    assert torch.equal(got.get().batch["later"], prompts().batch["input_ids"] * 2)


def test_a_method_registered_with_plain_verl_receives_the_reference(group: Any) -> None:
    got = group.by_hand(put(prompts()))
    assert got.meta_info == {"of": "RemoteProto"}
    assert got.get().batch["first"].tolist() == list(range(0, 32, 4))


def test_metrics_and_whole_batches_are_passed_through(group: Any, tensor: int) -> None:
    remote = put(prompts())
    assert sum(group.metric(remote)) == sum(range(32))
    assert group.whole(remote) == [(8, "DataProto")] * 2 * tensor


def test_padding_follows_the_settings_of_verl(group: Any) -> None:
    got = group.every_rank(put(prompts(7, auto_padding=True)))
    assert torch.equal(got.get().batch["input_ids"], prompts(7).batch["input_ids"])
    with pytest.raises(Misuse, match="pad"):
        group.every_rank(put(prompts(7)))


def test_rows_that_were_freed_are_an_error_of_the_call(group: Any) -> None:
    remote = put(prompts())
    remote.free()
    with pytest.raises(ray.exceptions.RayTaskError, match="Freed") as caught:
        group.forward(remote)
    assert isinstance(caught.value.cause, DataplaneError)


def test_results_of_workers_that_died_remain_readable(group: Any) -> None:
    """The bytes are the node's; a result outlives the worker that made it. Last: it ends the workers."""
    got = group.forward(put(prompts()))
    for worker in group.workers:
        ray.kill(worker)
    assert got.get().batch["values"].tolist() == prompts().batch["input_ids"].float().mean(-1).tolist()
