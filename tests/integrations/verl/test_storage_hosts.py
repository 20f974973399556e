"""TransferQueue with its rows in the plane, in a Ray job of two nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

from tests.integrations.marks import SYSTEMS
from tests.integrations.verl.storage_job import job, own, stats, worker
from tests.processes import eventually

pytestmark = [*SYSTEMS, pytest.mark.long]  # TransferQueue's and Ray's tests have two hosts too

NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
    cluster.add_node(**NODE)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def two(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A job on both; its dense fields come back dense."""
    spill = str(tmp_path_factory.mktemp("spill"))
    settings = {"memory": "32MiB", "spill": "128MiB", "spill_dir": spill, "prewarm": 0, "transports": ["tcp"]}
    with job(address=cluster.address, dense=True, **settings) as made:
        yield made
    ray.shutdown()


@pytest.fixture(scope="module")
def other(two: Any) -> Any:
    here = ray.get_runtime_context().get_node_id()
    (other,) = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    return worker(other)


def rows(count: int, **entries: Any) -> TensorDict:
    return TensorDict(entries, batch_size=[count])


def test_rows_of_two_hosts_are_read_on_both(other: Any) -> None:
    before = own(stats()), ray.get(other.call.remote("own"), timeout=60)
    tq.kv_batch_put(
        keys=["a", "b"], partition_id="p", fields=rows(2, x=torch.ones(2, 4096), big=torch.ones(2, 1 << 20))
    )
    ray.get(other.call.remote("kv_batch_put", ["c"], "p", rows(1, x=torch.full((1, 4096), 2.0))), timeout=90)
    assert ray.get(other.call.remote("used"), timeout=60) >= 4096 * 4
    for got in (
        tq.kv_batch_get(keys=["c", "a", "b"], partition_id="p"),
        ray.get(other.call.remote("kv_batch_get", ["c", "a", "b"], "p"), timeout=60),
    ):
        assert torch.equal(got["x"], torch.tensor([2.0, 1, 1])[:, None].expand(3, 4096)), "dense, as was asked for"
    assert ray.get(other.call.remote("fetched"), timeout=60) < 1 << 20, "the field that not all rows have stays there"
    del got
    ray.get(other.call.remote("kv_clear", ["a", "b", "c"], "p"), timeout=60)
    eventually(lambda: own(stats()) <= before[0], "all here is free, but for the copy, which is the first to be taken")
    eventually(lambda: ray.get(other.call.remote("own"), timeout=60) <= before[1], "and there")
