"""verl's workers: rollout, reward, actor and reference. Their methods are the same by value and by reference.

Their `register` is the data plane's, with the columns that a method reads. Each method reports its computing time in
its metrics, so the rest of a call's time is for moving data.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, Execute, make_nd_compute_dataproto_dispatch_fn
from verl.trainer.ppo.core_algos import compute_policy_loss
from verl.utils.model import extract_multi_modal_inputs
from verl.utils.torch_functional import logprobs_from_logits

from dataplane.integrations.process import plane
from dataplane.integrations.verl.dispatch import register
from examples.verl_rollout.memory import forget_peak, peak_bytes
from examples.verl_rollout.model import EOS, PAD, forward, make_model, process, prompt

ACTOR = make_nd_compute_dataproto_dispatch_fn(mesh_name="actor")
TEXT = 100  # tokens below are text; only they are sampled
TOKENS = ["input_ids", "attention_mask", "responses", "response_mask"]


class Measured(Worker):
    """The methods of all workers."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start(self, plain: bool) -> None:
        """Create new models, reset the peak, and connect to the plane unless `plain`."""
        if not plain:
            plane()
        self._begin()
        forget_peak()

    def _begin(self) -> None:
        """Create the models of a run."""

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def peak(self) -> int:
        return peak_bytes()


class RolloutWorker(Measured):
    def __init__(self, side: int, response_length: int) -> None:
        super().__init__()
        self._side = side
        self._response_length = response_length

    def _begin(self) -> None:
        self._model = make_model()

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate responses. The processor runs for each row, as in verl's agent loop."""
        began = time.perf_counter()
        torch.manual_seed(prompts.meta_info["seed"] + self.rank)
        images = prompts.non_tensor_batch["image"].tolist()
        inputs = [process(image, self._side) for image in images]
        tokens = torch.tensor([prompt(image, self._side) for image in images])
        made = []
        for rows in _micro_batches(len(prompts)):
            pixels = extract_multi_modal_inputs(inputs[rows])
            made.append(self._sample(tokens[rows], pixels))
        responses = torch.cat(made)
        ended = (responses == EOS).cumsum(-1) - (responses == EOS).int()
        mask = (ended == 0).long()
        input_ids = torch.cat([tokens, responses.where(mask.bool(), PAD)], dim=-1)
        rows_of_inputs = np.empty(len(inputs), object)
        rows_of_inputs[:] = inputs
        return DataProto.from_dict(
            tensors={
                "input_ids": input_ids,
                "attention_mask": torch.cat([torch.ones_like(tokens), mask], dim=-1),
                "responses": responses,
                "response_mask": mask,
            },
            non_tensors={"multi_modal_inputs": rows_of_inputs},
            meta_info={"metrics": {"computed": time.perf_counter() - began}},
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load(self, state: dict[str, Any]) -> None:
        self._model.load_state_dict(state)

    @torch.no_grad()
    def _sample(self, tokens: torch.Tensor, pixels: dict[str, torch.Tensor]) -> torch.Tensor:
        length = tokens.shape[1]
        for _ in range(self._response_length):
            logits = forward(self._model, tokens, torch.ones_like(tokens), pixels)
            drawn = torch.multinomial(logits[:, -1, :TEXT].softmax(-1), 1)
            tokens = torch.cat([tokens, drawn], dim=-1)
        return tokens[:, length:]


class RewardWorker(Measured):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, columns=["responses", "response_mask", "image"])
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Rewards at the last tokens: 1 if most tokens of a response have the parity of its image's number, else 0."""
        began = time.perf_counter()
        responses, mask = data.batch["responses"], data.batch["response_mask"]
        kind = torch.tensor([image % 2 for image in data.non_tensor_batch["image"]])[:, None]
        right = ((responses % 2 == kind) * mask).sum(-1) * 2 > mask.sum(-1)
        scores = torch.zeros(responses.shape)
        scores[torch.arange(len(data)), mask.sum(-1) - 1] = right.float()
        metrics = {"computed": time.perf_counter() - began, "reward": float(right.float().mean())}
        return DataProto.from_dict(tensors={"token_level_rewards": scores}, meta_info={"metrics": metrics})


class ActorWorker(Measured):
    """The policy, which is trained, and the reference."""

    def __init__(self) -> None:
        super().__init__()
        torch.distributed.init_process_group("gloo", rank=self.rank, world_size=self.world_size)
        self._register_dispatch_collect_info("actor", dp_rank=self.rank, is_collect=True)

    def _begin(self) -> None:
        self._policy, self._reference = make_model(), make_model()
        self._optimizer = torch.optim.AdamW(self._policy.parameters(), lr=1e-3)

    @register(dispatch_mode=ACTOR, columns=[*TOKENS, "multi_modal_inputs"], lazy=["multi_modal_inputs"])
    def compute_log_prob(self, data: DataProto) -> DataProto:
        return self._log_probs(self._policy, data, "old_log_probs")

    @register(dispatch_mode=ACTOR, columns=[*TOKENS, "multi_modal_inputs"], lazy=["multi_modal_inputs"])
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        return self._log_probs(self._reference, data, "ref_log_prob")

    @register(
        dispatch_mode=ACTOR,
        columns=[*TOKENS, "old_log_probs", "advantages", "multi_modal_inputs"],
        lazy=["multi_modal_inputs"],
    )
    def update_actor(self, data: DataProto) -> DataProto:
        began = time.perf_counter()
        losses = []
        self._optimizer.zero_grad()
        for rows in _micro_batches(len(data)):
            part = data[rows]
            new = self._log_prob(self._policy, part)
            names = ("old_log_probs", "advantages", "response_mask")
            old, advantages, mask = (part.batch[name] for name in names)
            loss, _, _, _ = compute_policy_loss(old, new, advantages, mask, cliprange=0.2)
            (loss * len(part) / len(data)).backward()
            losses.append(float(loss))
        for parameter in self._policy.parameters():
            if parameter.grad is not None:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= self.world_size
        self._optimizer.step()
        metrics = {"computed": time.perf_counter() - began, "loss": sum(losses) / len(losses)}
        return DataProto(meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def state(self) -> dict[str, Any]:
        return dict(self._policy.state_dict())

    @torch.no_grad()
    def _log_probs(self, model: Any, data: DataProto, name: str) -> DataProto:
        began = time.perf_counter()
        found = torch.cat([self._log_prob(model, data[rows]) for rows in _micro_batches(len(data))])
        metrics = {"computed": time.perf_counter() - began}
        return DataProto.from_dict(tensors={name: found}, meta_info={"metrics": metrics})

    def _log_prob(self, model: Any, data: DataProto) -> torch.Tensor:
        pixels = extract_multi_modal_inputs(data.non_tensor_batch["multi_modal_inputs"])
        logits = forward(model, data.batch["input_ids"], data.batch["attention_mask"], pixels)
        length = data.batch["responses"].shape[1]
        found: torch.Tensor = logprobs_from_logits(
            logits[:, -length - 1 : -1].contiguous(), data.batch["responses"], inplace_backward=False
        )
        return found


def _micro_batches(rows: int, size: int = 8) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, rows, size))
