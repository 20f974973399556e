"""The checkpoint engine `dataplane` on verl's own `CheckpointEngineManager` and `CheckpointEngineWorker`, with a stub
for the server adapter: replicas take weights when they are ready, and nothing is aborted for it."""

from __future__ import annotations

import asyncio
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import dataplane as dp
from tests.integrations.marks import SYSTEMS

with warnings.catch_warnings(action="ignore"):  # verl's own
    import ray
    import torch
    from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineWorker
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.workers.config import CheckpointEngineConfig

    from dataplane.integrations import ray as door
    from dataplane.integrations.verl import checkpointing

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = SYSTEMS

MODULE = "dataplane.integrations.verl.checkpointing"
WAIT_S = 100.0


def config(**settings: Any) -> CheckpointEngineConfig:
    return CheckpointEngineConfig(
        backend="dataplane",
        custom_backend_module=MODULE,
        update_weights_bucket_megabytes=1,
        engine_kwargs={"dataplane": {"name": "actor", "timeout": 60.0, **settings}},
    )


class Trainer(Worker):
    """What verl's actor workers have for weights: an engine that gives them, and a checkpoint engine."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        from verl.checkpoint_engine import CheckpointEngineRegistry
        from verl.utils.import_utils import import_external_libs

        import_external_libs(config.custom_backend_module)
        how = config.engine_kwargs["dataplane"]
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            "dataplane", is_master=self.rank == 0, bucket_size=1 << 20, **how
        )
        self.gathered = 0

    def per_tensor_param(self, step: int) -> Iterator[tuple[str, Any]]:
        """Each rank of a real one gathers every tensor with all others."""
        for number in range(4):
            self.gathered += 1
            yield f"layers.{number}.weight", torch.full((256, 128), step + number / 8, dtype=torch.bfloat16)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        return await self.checkpoint_engine.send_weights(self.per_tensor_param(global_steps), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def look(self) -> int:
        return self.gathered


class Server:
    """A stub for a server adapter: takes weights once its requests are over."""

    replica_rank, is_leader_rank = 0, True

    def __init__(self) -> None:
        self.idle = asyncio.Event()
        self.idle.set()
        self.steps: list[int] = []
        self.values: list[float] = []

    async def update_weights(self, weights: Any, global_steps: int | None = None, wire_format: str = "") -> None:
        assert wire_format == "named_tensors"
        await self.idle.wait()
        found = {name: tensor async for name, tensor in weights}
        assert list(found) == [f"layers.{number}.weight" for number in range(4)]
        value = float(found["layers.0.weight"][0, 0])
        for number, tensor in enumerate(found.values()):
            assert tensor.dtype == torch.bfloat16
            assert bool((tensor == value + number / 8).all()), "all of one version"
        self.steps.append(global_steps)
        self.values.append(value)


class Rollout(CheckpointEngineWorker):
    """verl's worker, with the stub."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        from types import SimpleNamespace

        super().__init__(SimpleNamespace(checkpoint_engine=config, name="stub", mode="async"), None, Server())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def busy(self, busy: bool) -> None:
        self.server_adapter.idle.clear() if busy else self.server_adapter.idle.set()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def taken(self) -> tuple[list[int], list[float]]:
        return self.server_adapter.steps, self.server_adapter.values

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def newest(self) -> dict[str, float]:
        """What a rollout finds by itself, whenever it looks."""
        return {name: float(tensor[0, 0]) async for name, tensor in self.checkpoint_engine.get_weights()}


class Replica:
    """What a manager uses of verl's `RolloutReplica`; counts what is done to its requests."""

    def __init__(self, workers: list[Any]) -> None:
        self.workers = workers
        self.aborted = 0

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self.aborted += 1

    async def nothing(self) -> None: ...

    release_kv_cache = resume_kv_cache = resume_generation = nothing


@contextmanager
def group(kind: type, count: int, config: CheckpointEngineConfig) -> Iterator[Any]:
    pool = RayResourcePool([count], use_gpu=False, max_colocate_count=1)
    made = RayClassWithInitArgs(cls=ray.remote(num_cpus=0)(kind), config=config)
    workers = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu")
    yield workers
    for worker in workers.workers:
        ray.kill(worker)
    for place in pool.pgs:
        ray.util.remove_placement_group(place)


@pytest.fixture(scope="module", autouse=True)
def nodes(job: None) -> None:
    door.up(dp.NodeConfig(memory="64MiB", spill=0, prewarm=0))


def test_replicas_take_weights_when_they_are_ready() -> None:
    how = config(name="ready", keep=2)
    with group(Trainer, 1, how) as trainer, group(Rollout, 2, how) as rollouts:
        replicas = [Replica([worker]) for worker in rollouts.workers]
        quick, slow = (
            RayWorkerGroup(worker_handles=[worker], ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(Rollout)))
            for worker in rollouts.workers
        )
        manager = CheckpointEngineManager(how, trainer, replicas)
        manager.update_weights(1)
        checkpointing.settle(manager, 1, WAIT_S)
        slow.busy(True)
        for step in (2, 3, 4, 5):
            manager.update_weights(step)
            checkpointing._replicas[manager].of(replicas)[0].wait(step, WAIT_S)
        assert quick.taken() == [([1, 2, 3, 4, 5], [1.0, 2.0, 3.0, 4.0, 5.0])]
        assert slow.taken() == [([1], [1.0])], "its requests run on"
        assert slow.newest() == [{f"layers.{number}.weight": 5 + number / 8 for number in range(4)}]
        slow.busy(False)
        checkpointing.settle(manager, 5, WAIT_S)
        ((steps, values),) = slow.taken()
        assert steps[-1] == 5
        assert len(steps) < 5, "it passed over those that it was too slow for"
        assert values == [float(step) for step in steps]
        assert [replica.aborted for replica in replicas] == [0, 0]
        assert dp.connect("ray").weights("ready").versions() == [4, 5]


@pytest.mark.long
def test_a_blocking_weight_update_works_as_with_the_engines_of_verl() -> None:
    how = config(name="own", abort=True)
    with group(Trainer, 2, how) as trainer, group(Rollout, 2, how) as rollouts:
        replica = Replica(rollouts.workers)
        manager = CheckpointEngineManager(how, trainer, [replica])
        for step in (7, 7, 8):  # as verl's managers of two kinds of replicas do
            manager.update_weights(step)
        assert rollouts.taken() == [([7, 7, 8], [7.0, 7.0, 8.0])] * 2
        assert trainer.look() == [12, 12]
        assert replica.aborted == 3
