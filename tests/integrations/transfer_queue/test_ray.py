"""A job of Ray and verl: what stands in for TransferQueue in the driver does so in every worker, on one node."""

from __future__ import annotations

import pytest

from tests.integrations.nursery import Nursery

pytestmark = [pytest.mark.timeout(300)]

DRIVER = """
import dataplane.integrations.transfer_queue as ours
ours.install()

import ray, torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.utils import transferqueue_utils

assert tq is ours
ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=256 << 20, log_to_driver=False)
import dataplane as dp
from dataplane.integrations import ray as nodes
nodes.up(dp.NodeConfig(memory="64MiB", spill=0, prewarm=0))
tq.init({"backend": {"SimpleStorage": {"total_storage_size": "passed over"}}})


class Worker:
    def __init__(self):
        import verl  # which loads its plugins
        import transfer_queue

        self.module = transfer_queue.__name__

    def where(self):
        return self.module

    def double(self, meta):
        from verl.utils.transferqueue_utils import tqbridge

        @tqbridge()
        def double(data):
            assert data["x"].is_nested, "as TransferQueue gives it"
            return TensorDict({"y": data["x"] * 2}, batch_size=data.batch_size)

        return double(meta)


worker = ray.remote(Worker).remote()
assert ray.get(worker.where.remote()) == ours.__name__
meta = tq.kv_batch_put(["a", "b"], "train", fields=TensorDict({"x": torch.ones(2, 3)}, batch_size=[2]))
after = ray.get(worker.double.remote(meta))
assert after.keys == ["a", "b"] and sorted(after.fields) == ["x", "y"]
assert [row.tolist() for row in tq.kv_batch_get_by_meta(after, "y")["y"].unbind()] == [[2.0] * 3] * 2
tq.close()
ray.shutdown()
tell("all is well")
"""


def test_workers_of_a_ray_job_stand_in_too(nursery: Nursery) -> None:
    """By the plugin that verl loads in each of them."""
    with nursery.process(DRIVER) as driver:
        assert driver.hear() == "all is well"
        driver.wait()
