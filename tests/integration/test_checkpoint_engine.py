"""`DataplaneCheckpointEngine` as NeMo-RL makes and calls it, and where it refuses."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

import dataplane as dp
from dataplane.integrations import process
from dataplane.integrations.checkpoint_engine import DataplaneCheckpointEngine
from tests.cases import each_case

torch = pytest.importorskip("torch", reason="weights are tensors of PyTorch")

#: Methods of NeMo-RL's `CheckpointEngine` (nemo_rl/utils/checkpoint_engines/base.py at 7ea279abf): the arguments that
#: are given by place, those that are given by name, and what a call gives.
NEMO_RL = {
    "get_target_weight_layout": ((), (), "value"),
    "prepare": ((), (), "value"),
    "init_policy_process_group": ((), ("worker_rank", "train_world_size", "rollout_world_size", "metadata"), "value"),
    "init_rollout_process_group": ((), ("rollout_rank", "train_world_size", "rollout_world_size", "metadata"), "value"),
    "finalize": ((), (), "value"),
    "send_weights": (("weights",), (), "coroutine"),
    "receive_weight_batches": ((), (), "generator"),
}


@pytest.fixture
def plane(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    process.close()
    monkeypatch.delenv("DATAPLANE_ADDRESS", raising=False)
    yield process.start(dp.NodeConfig(memory="64MiB", spill=0, prewarm=0))
    process.close()


def made(**how: Any) -> Any:
    """As NeMo-RL makes it of `module:Class`."""
    module, _, name = "dataplane.integrations.checkpoint_engine:DataplaneCheckpointEngine".partition(":")
    return getattr(importlib.import_module(module), name)(bucket_size=1 << 16, **how)


@each_case("name", NEMO_RL)
def test_the_checkpoint_engine_has_the_methods_of_nemo_rl(name: str) -> None:
    positional, named, gives = NEMO_RL[name]
    method = getattr(DataplaneCheckpointEngine, name)
    inspect.signature(method).bind(None, *positional, **dict.fromkeys(named))
    kinds = {"coroutine": inspect.iscoroutinefunction(method), "generator": inspect.isasyncgenfunction(method)}
    assert [kind for kind, is_it in kinds.items() if is_it] == ([gives] if gives != "value" else [])
    assert DataplaneCheckpointEngine.shard_expert_weights is False


def parameters(step: int) -> Iterator[tuple[str, Any]]:
    for number in range(6):
        yield f"layers.{number}", torch.full((64, 128), step + number, dtype=torch.float32)  # 32 KiB


async def received(engine: Any) -> list[list[tuple[str, float]]]:
    return [[(name, float(one[0, 0])) for name, one in batch] async for batch in engine.receive_weight_batches()]


def test_a_refit_in_the_call_order_of_nemo_rl_transfers_all_weights(plane: Any) -> None:
    policy, rollouts = [made(), made()], [made(), made()]
    sizes = {"train_world_size": 2, "rollout_world_size": 2}
    for step in (10, 20):
        metadata: list[Any] = [{**engine.prepare(), "rank": 0} for engine in [*policy, *rollouts]]
        for rank, engine in enumerate(policy):
            engine.init_policy_process_group(worker_rank=rank, metadata=metadata, **sizes)
        for rank, engine in enumerate(rollouts):
            engine.init_rollout_process_group(rollout_rank=rank, metadata=metadata, **sizes)
        ran = [parameters(step) for _ in policy]

        async def refit(ran: list[Any] = ran) -> list[Any]:
            reading = [asyncio.create_task(received(engine)) for engine in rollouts]
            await asyncio.sleep(0)
            for engine, weights in zip(policy, ran, strict=True):
                await engine.send_weights(weights)
            return await asyncio.gather(*reading)

        for batches in asyncio.run(refit()):
            assert [len(batch) for batch in batches] == [2, 2, 2], "of 64 KiB"
            assert [pair for batch in batches for pair in batch] == [(f"layers.{n}", float(step + n)) for n in range(6)]
        assert all(next(weights, None) is None for weights in ran), "each rank has gathered all"
        assert {engine.version for engine in [*policy, *rollouts]} == {step // 10}
        for engine in [*policy, *rollouts]:
            engine.finalize()
    assert plane.weights("actor").versions() == [1, 2]
