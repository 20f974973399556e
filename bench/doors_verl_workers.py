"""The workers of `bench.doors_verl`: verl's, without a model. They touch every byte that a model would."""

from __future__ import annotations

import time

import numpy as np
import torch
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn
from verl.utils.model import extract_multi_modal_inputs

from dataplane.integrations.process import plane
from dataplane.integrations.verl.dispatch import register
from examples.verl_rollout.memory import peak_bytes

PATCHES, WIDTH = 1024, 1176  # of an image of 448 x 448 pixels, as Qwen2-VL's processor makes them, float32
TOKENS = 1024
MICRO_BATCH = 8
MESH = make_nd_compute_dataproto_dispatch_fn(mesh_name="actor")


class Measured(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start(self, plain: bool) -> None:
        """Be there, connected."""
        if not plain:
            plane()

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def peak(self) -> int:
        return peak_bytes()


class Rollout(Measured):
    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate(self, prompts: DataProto) -> DataProto:
        """A response a row, with its own pixels, equal to those of the prompt's other rows: verl's agent loop runs the
        processor for each response."""
        began = time.perf_counter()
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
        meta = {"metrics": {"computed": time.perf_counter() - began}}
        return DataProto.from_dict(tensors, {"multi_modal_inputs": inputs}, meta_info=meta)


class Consumer(Measured):
    """Of a mesh in which each data-parallel rank is `tensor` tensor-parallel ranks wide."""

    def __init__(self, tensor: int) -> None:
        super().__init__()
        data_rank, tensor_rank = divmod(self.rank, tensor)
        self._register_dispatch_collect_info("actor", dp_rank=data_rank, is_collect=tensor_rank == 0)

    @register(dispatch_mode=MESH, lazy=["multi_modal_inputs"])
    def phase(self, data: DataProto) -> DataProto:
        """What computing log-probs or an update does with its data: all pixels, one micro-batch after another."""
        began = time.perf_counter()
        sums = []
        rows = data.non_tensor_batch["multi_modal_inputs"]
        for start in range(0, len(data), MICRO_BATCH):
            pixels = extract_multi_modal_inputs(rows[start : start + MICRO_BATCH])["pixel_values"]
            sums.append(pixels.view(-1, PATCHES * WIDTH).sum(-1))
        values = torch.cat(sums) + 0 * data.batch["input_ids"].sum(-1)
        meta = {"metrics": {"computed": time.perf_counter() - began}}
        return DataProto.from_dict({"values": values}, meta_info=meta)
