"""`trainer.data_plane=dataplane`: found by verl, and used by real workers of Ray."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch
from omegaconf import OmegaConf
from verl.experimental.neoproto import DataProto, neo, set_default_storage_engine
from verl.single_controller.base.decorator import _split_args_kwargs_data_proto
from verl.trainer.ppo import data_plane

import dataplane as dp
from dataplane.integrations import process
from dataplane.integrations.verl import plugin
from dataplane.integrations.verl.neo import BACKEND, DataplaneStorageEngine
from tests.integrations.marks import SYSTEMS

CONFIG = OmegaConf.create({"trainer": {"data_plane": "dataplane"}})

pytestmark = SYSTEMS
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(autouse=True)
def afterwards() -> Iterator[None]:
    assert plugin.register_neo()
    yield
    set_default_storage_engine(None)
    neo.GLOBAL_ENGINE_DICT.pop(BACKEND, None)


def test_verl_resolves_the_data_plane_by_name(plane: Any) -> None:
    assert "dataplane" in data_plane._DATA_PLANE_CLASSES
    assert data_plane.resolve_data_proto_cls(CONFIG) is DataProto
    made = data_plane.build_data_plane(CONFIG)
    assert made.name == "dataplane"
    data = made.data_proto_cls.from_dict(tensors={"input_ids": torch.arange(6).reshape(3, 2)})
    assert data.ref_table["input_ids"].backend == "dataplane"
    request = made.prepare_inference(data, {"compute_loss": False}).payload
    assert torch.equal(request.batch["input_ids"], torch.arange(6).reshape(3, 2))
    assert data_plane.build_data_plane(OmegaConf.create({"trainer": {"data_plane": "neoproto"}})).name == "neoproto"


def test_the_data_plane_requires_a_node_address(monkeypatch: pytest.MonkeyPatch) -> None:
    process.close()
    monkeypatch.delenv("DATAPLANE_ADDRESS", raising=False)
    with pytest.raises(dp.Misuse, match="DATAPLANE_ADDRESS"):
        data_plane.build_data_plane(CONFIG)


class Worker:
    """Computes what a rank does, of its share."""

    def infer(self, data: Any) -> Any:
        assert type(data._engine()) is DataplaneStorageEngine
        return DataProto.from_dict(tensors={"log_probs": data.batch["input_ids"].float() * 2})


@pytest.fixture(scope="module")
def job() -> Iterator[None]:
    process.close()
    ray.init(num_cpus=2, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
    from dataplane.integrations import ray as door

    door.up(dp.NodeConfig(memory="64MiB", spill=0, prewarm=0))
    yield
    process.close()
    ray.shutdown()


def test_ranks_read_their_share_and_their_results_are_freed(job: None) -> None:
    made = data_plane.build_data_plane(CONFIG)
    with dp.connect("ray") as plane:
        tokens = torch.arange(1 << 16).reshape(1024, 64)
        data = made.data_proto_cls.from_dict(tensors={"input_ids": tokens})
        workers = [ray.remote(num_cpus=0)(Worker).remote() for _ in range(2)]
        for _ in range(2):
            (chunks,), _ = _split_args_kwargs_data_proto(2, made.prepare_inference(data, {}).payload)
            answers = ray.get([w.infer.remote(c) for w, c in zip(workers, chunks, strict=True)], timeout=90)
            collected = made.collect_inference(DataProto.concat(answers), None, {"log_probs": "old_log_probs"})
            assert torch.equal(collected.batch["old_log_probs"], tokens.float() * 2)
            del chunks, answers, collected
        del data
        gc.collect()
        assert process.settle()
        assert plane.stats().shards == 0
