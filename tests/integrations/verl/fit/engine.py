"""The actor's and the reference's engine: log-probabilities that follow from token ids and a count of updates.

It records each row that it is given, all its fields, once per phase: what reached a trainer's rank. The count is a
parameter that each update adds one to; it is saved, loaded, and sent to the servers as the weights. All numbers are
multiples of 2^-10, whose sums are exact in any order. Micro-batches and losses are verl's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from verl.utils import tensordict_utils as tu
from verl.workers.engine.base import BaseEngine, BaseEngineCtx, EngineRegistry
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

from . import record


class _Counted(torch.nn.Module):
    """The state: a parameter that all ranks have."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        self.updates = torch.nn.Parameter(distribute_tensor(torch.zeros(1), mesh, [Replicate()]))

    @property
    def count(self) -> torch.Tensor:
        return self.updates.detach().to_local()


@EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")
class CountedEngine(BaseEngine):
    def __init__(self, *, engine_config: Any, **_: Any) -> None:
        self._phase = "reference" if engine_config.forward_only else "actor"
        self.mode: str | None = None

    is_param_offload_enabled = is_optimizer_offload_enabled = False

    def initialize(self) -> None:
        self.module = _Counted()

    def train_mode(self, **named: Any) -> BaseEngineCtx:
        return BaseEngineCtx(self, "train", **named)

    def eval_mode(self, **named: Any) -> BaseEngineCtx:
        return BaseEngineCtx(self, "eval", **named)

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        record.rows(self._phase if forward_only else "update", data)
        tokens = data["loss_mask"].sum()
        torch.distributed.all_reduce(tokens)
        tu.assign_non_tensor(data, sp_size=1, batch_num_tokens=tokens.item(), dp_size=self.get_data_parallel_size())
        batches, indices = prepare_micro_batches(data, dp_group=self.get_data_parallel_group())
        self._gradient = torch.zeros(1)
        with torch.no_grad() if forward_only else nullcontext():
            outputs = [self._forward(batch, loss_function) for batch in batches]
        return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

    def _forward(self, batch: Any, loss_function: Callable[..., Any] | None) -> dict[str, Any]:
        bias = torch.zeros(1, requires_grad=True)
        ids = batch["input_ids"]
        likely = -((ids.values() * 7 + self.module.count.long()) % 64).float() / 64 - 1 / 1024
        if loss_function is not None:  # the rollout's first token decides the sign: a gradient that is none of zero
            likely = likely + bias
        offsets = ids.offsets()
        output = {
            "log_probs": torch.nested.nested_tensor_from_jagged(likely, offsets),
            "entropy": torch.nested.nested_tensor_from_jagged((ids.values() % 8).float() / 8, offsets),
        }
        if loss_function is None:
            return {"model_output": output, "loss": 0.0, "metrics": {}}
        loss, metrics = loss_function(model_output=output, data=batch, dp_group=self.get_data_parallel_group())
        loss.backward()
        self._gradient += bias.grad
        return {"model_output": {}, "loss": loss.detach().item(), "metrics": metrics}

    def optimizer_zero_grad(self) -> None: ...

    def optimizer_step(self) -> float:
        with torch.no_grad():
            self.module.updates += 1
        return float(self._gradient.abs())

    def lr_scheduler_step(self) -> float:
        return 1e-6

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        return iter([("updates", self.module.count.clone())]), None

    def get_data_parallel_size(self) -> int:
        return torch.distributed.get_world_size()

    def get_data_parallel_rank(self) -> int:
        return torch.distributed.get_rank()

    def get_data_parallel_group(self) -> Any:
        return torch.distributed.group.WORLD

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None: ...

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True

    def save_checkpoint(self, local_path: str, *_: Any, **__: Any) -> None:
        os.makedirs(local_path, exist_ok=True)
        torch.save(self.module.count, os.path.join(local_path, f"rank_{self.get_data_parallel_rank()}.pt"))

    def load_checkpoint(self, local_path: str, *_: Any, **__: Any) -> None:
        saved = torch.load(os.path.join(local_path, f"rank_{self.get_data_parallel_rank()}.pt"))
        with torch.no_grad():
            self.module.count.copy_(saved)
