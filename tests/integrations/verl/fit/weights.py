"""How weights reach servers that share no process with the trainer: a checkpoint engine of verl, over an actor of Ray.

`actor_rollout_ref.rollout.checkpoint_engine.backend=mail`, `.custom_backend_module=fit.weights`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from . import rollout
from .server import Mail

rollout.register()  # a standalone replica's worker imports nothing else of ours


@CheckpointEngineRegistry.register("mail")
class MailEngine(CheckpointEngine):
    """One number: the updates so far."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._is_master = is_master

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(cls, actor_world: int, rollout_world: int, metadata: list[Any]) -> tuple[Any, Any]:
        return {"rank": list(range(actor_world))}, {"rank": list(range(rollout_world))}

    def init_process_group(self, rank: int) -> None: ...

    def finalize(self) -> None: ...

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        updates = dict(weights)["updates"]
        if self._is_master:
            await _mail().send.remote(global_steps, float(updates))

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        yield "updates", torch.tensor(await _mail().receive.remote(global_steps))


def _mail() -> Any:
    """The actor. It ends with Ray: one that has an owner ends with its first handle, under the call of the other."""
    return ray.remote(num_cpus=0)(Mail).options(name="mail", get_if_exists=True, lifetime="detached").remote()
