"""TransferQueue with its rows in the plane, in a Ray job of two nodes: between hosts, to disk, and when one dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
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
    """Two Ray nodes."""
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
    """An actor on the other Ray node."""
    here = ray.get_runtime_context().get_node_id()
    (other,) = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != here]
    return worker(other)


def rows(count: int, **entries: Any) -> TensorDict:
    return TensorDict(entries, batch_size=[count])


def test_rows_of_two_hosts_are_read_on_both(other: Any) -> None:
    """Each where it was put; a reader fetches what it asks for, and whoever clears frees both."""
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
    eventually(lambda: own(stats()) == 0, "all here is free, but for the copy, which is the first to be taken")
    eventually(lambda: ray.get(other.call.remote("own"), timeout=60) == 0, "and there")


def test_rows_on_two_hosts_round_trip_through_a_checkpoint(other: Any, tmp_path: Path) -> None:
    """Each host writes what it has, and reads a part of it again; wherever the values are then, both find them."""

    def here_and_there() -> list[tuple[int, ...]]:
        return [
            (own(stats()), stats().fetched_bytes),
            tuple(ray.get([other.call.remote(of) for of in ("own", "fetched")])),
        ]

    held = torch.arange(1 << 18, dtype=torch.float32)[None]  # a mebibyte
    for partition, number in (("c", 1.0), ("c", 2.0)):
        tq.kv_batch_put([f"here{number}"], partition, rows(1, x=held + number))
        fields = rows(1, x=held - number)
        ray.get(other.call.remote("kv_batch_put", [f"there{number}"], partition, fields), timeout=90)
    before = here_and_there()
    tq.save_checkpoint(tmp_path / "checkpoint")
    assert len(list((tmp_path / "checkpoint").rglob("*.rows"))) == 2
    assert here_and_there() == before, "no host asked the other for values"
    tq.get_client().clear_partition("c")
    tq.load_checkpoint(tmp_path / "checkpoint")
    assert all(shards for shards, _ in here_and_there()), "both have values"
    for got in (
        tq.kv_batch_get(keys=["there1.0", "here1.0", "there2.0", "here2.0"], partition_id="c"),
        ray.get(other.call.remote("kv_batch_get", ["there1.0", "here1.0", "there2.0", "here2.0"], "c"), timeout=60),
    ):
        assert torch.equal(got["x"], torch.cat([held - 1, held + 1, held - 2, held + 2]))
    del got
    tq.get_client().clear_partition("c")
    eventually(lambda: [shards for shards, _ in here_and_there()] == [0, 0], "all of it is free")
