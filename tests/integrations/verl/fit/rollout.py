"""The servers of made-up tokens, as a rollout of verl: `actor_rollout_ref.rollout.name=scripted`.

What is said about them is in `rollout.engine_kwargs.scripted`: `words`, `eos`, `cut_token` (`server`).
"""

from __future__ import annotations

import os
from typing import Any

import ray
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from .server import Server

NAME = "scripted"


class Replica(RolloutReplica):
    async def launch_servers(self) -> None:
        made_of = dict(self.config.engine_kwargs[NAME])
        server = ray.remote(num_cpus=0)(Server).options(name=_name(self.replica_rank), max_concurrency=1000)
        self._server_handle = server.remote(length=self.config.response_length, **made_of)
        self._server_address = _name(self.replica_rank)
        self.servers = [self._server_handle]
        if self.rollout_mode is RolloutMode.STANDALONE:  # nobody wakes one that shares no processor with a trainer
            await self._server_handle.wake_up.remote()


class Adapter(base.BaseRollout):
    """What a trainer's rank, or a standalone replica's worker, has of its server."""

    def __init__(self, *arguments: Any, replica_rank: int = -1, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.replica_rank = int(os.environ["RANK"]) if replica_rank < 0 else replica_rank
        self.is_leader_rank = True

    async def resume(self, tags: list[str]) -> None:
        await self._server().wake_up.remote(tags)

    async def release(self) -> None:
        await self._server().sleep.remote()

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        received = {name: weight async for name, weight in ensure_async_iterator(weights)}
        await self._server().set_weights.remote(float(received["updates"]), global_steps)

    def _server(self) -> Any:
        return ray.get_actor(_name(self.replica_rank))


def register() -> None:
    RolloutReplicaRegistry.register(NAME, lambda: Replica)
    base._ROLLOUT_REGISTRY[NAME, "async"] = f"{__name__}.{Adapter.__name__}"


def _name(replica_rank: int) -> str:
    return f"{NAME}_server_{replica_rank}"
