"""The workers of `bench.doors_verl`: verl's workers without a model. They read every byte that a model would read."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn
from verl.utils.model import extract_multi_modal_inputs

from dataplane.integrations.process import plane
from dataplane.integrations.verl.dispatch import register
from examples.verl_rollout.memory import forget_peak, peak_bytes

PATCHES, WIDTH = 1024, 1176  # of an image of 448 x 448 pixels, as Qwen2-VL's processor makes them, float32
TOKENS = 1024
MICRO_BATCH = 8
PARTITION = "bench"
MESH = make_nd_compute_dataproto_dispatch_fn(mesh_name="actor")


class Measured(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start(self, queue: bool) -> None:
        """Connect to the plane, and to TransferQueue if `queue`."""
        plane()
        if queue:
            tq.init()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def forget_peak(self) -> None:
        """Reset the peak of this process's memory."""
        forget_peak()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def peak(self) -> int:
        return peak_bytes()


class Rollout(Measured):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate(self, prompts: DataProto) -> DataProto:
        """Generate a response for each row, with its own copy of the prompt's pixels: verl's agent loop runs the
        processor for each response."""
        began = time.perf_counter()
        made = self._make(prompts)
        made.meta_info = {"metrics": {"computed": time.perf_counter() - began}}
        return made

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate_into_queue(self, prompts: DataProto) -> DataProto:
        """The same, put into TransferQueue with a key a row, as in verl's newer trainer. Returns the keys."""
        began = time.perf_counter()
        fields = self._make(prompts).to_tensordict()
        computed = time.perf_counter() - began
        keys = [f"{self.rank}-{row}" for row in range(len(prompts))]
        tq.kv_batch_put(keys, PARTITION, fields, tags=[{} for _ in keys])
        return DataProto.from_dict(
            {"dummy_tensor": torch.zeros(len(keys), 1)},
            {"keys": np.array(keys, dtype=object)},
            meta_info={"metrics": {"computed": computed}},
        )

    def _make(self, prompts: DataProto) -> DataProto:
        images = {}
        for image in dict.fromkeys(prompts.non_tensor_batch["image"].tolist()):
            images[image] = torch.randn(PATCHES, WIDTH, generator=torch.Generator().manual_seed(image))
        inputs = np.empty(len(prompts), object)
        for row, image in enumerate(prompts.non_tensor_batch["image"].tolist()):
            inputs[row] = {"pixel_values": images[image].clone(), "image_grid_thw": torch.tensor([[1, 32, 32]])}
        tensors = {
            "input_ids": torch.randint(0, 150_000, (len(prompts), TOKENS)),
            "attention_mask": torch.ones(len(prompts), TOKENS, dtype=torch.long),
            "responses": torch.randint(0, 150_000, (len(prompts), TOKENS // 2)),
        }
        return DataProto.from_dict(tensors, {"multi_modal_inputs": inputs})


class Consumer(Measured):
    """A rank of a mesh. Each data-parallel rank has `tensor` tensor-parallel ranks."""

    def __init__(self, tensor: int) -> None:
        super().__init__()
        data_rank, tensor_rank = divmod(self.rank, tensor)
        self._register_dispatch_collect_info("actor", dp_rank=data_rank, is_collect=tensor_rank == 0)

    @register(dispatch_mode=MESH, lazy=["multi_modal_inputs"])
    def phase(self, data: DataProto) -> DataProto:
        """Read all pixels, one micro-batch after another, like a computation of log-probs or an update."""
        return self._touch(data.non_tensor_batch["multi_modal_inputs"], data.batch["input_ids"])

    @register(dispatch_mode=MESH)
    def phase_from_queue(self, data: DataProto) -> DataProto:
        """The same from TransferQueue. Every rank gets its rows, as in verl's bridge."""
        fields = tq.kv_batch_get(data.non_tensor_batch["keys"].tolist(), PARTITION)
        return self._touch(fields["multi_modal_inputs"], fields["input_ids"])

    def _touch(self, rows: Any, input_ids: torch.Tensor) -> DataProto:
        sums, computed = [], 0.0
        for start in range(0, len(rows), MICRO_BATCH):
            inputs = [dict(row.items()) for row in rows[start : start + MICRO_BATCH]]  # handles are read now
            began = time.perf_counter()
            pixels = extract_multi_modal_inputs(inputs)["pixel_values"]
            sums.append(pixels.view(-1, PATCHES * WIDTH).sum(-1))
            computed += time.perf_counter() - began
        values = torch.cat(sums) + 0 * input_ids.sum(-1)
        return DataProto.from_dict({"values": values}, meta_info={"metrics": {"computed": computed}})
