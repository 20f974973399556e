"""The worker of the dispatch tests: a mesh of data-parallel ranks, each `tensor` tensor-parallel ranks wide."""

from __future__ import annotations

import os
from typing import Any

import torch
from verl.protocol import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn
from verl.single_controller.base.decorator import register as register_of_verl
from verl.utils.model import extract_multi_modal_inputs

from dataplane.integrations.process import plane
from dataplane.integrations.verl.dispatch import register
from dataplane.integrations.verl.proto import put
from tests.integrations.verl.protos import objects

MESH = make_nd_compute_dataproto_dispatch_fn(mesh_name="actor")


class MeshWorker(Worker):
    def __init__(self, tensor: int) -> None:
        super().__init__()
        data_rank, tensor_rank = divmod(self.rank, tensor)
        self._register_dispatch_collect_info("actor", dp_rank=data_rank, is_collect=tensor_rank == 0)

    @register(dispatch_mode=MESH)
    def forward(self, data: DataProto) -> DataProto:
        assert type(data) is DataProto
        values = data.batch["input_ids"].float().mean(-1)
        return DataProto.from_dict(
            tensors={"values": values, "rank": torch.full((len(data),), self.rank)},
            non_tensors={"seen": objects(data.non_tensor_batch["uid"].tolist())},
            meta_info={"metrics": {"rank": self.rank}},
        )

    @register(dispatch_mode=MESH, columns=["multi_modal_inputs"], lazy=["multi_modal_inputs"])
    def pixels(self, data: DataProto) -> DataProto:
        rows = data.non_tensor_batch["multi_modal_inputs"]
        sums = [float(extract_multi_modal_inputs([row])["pixel_values"].sum()) for row in rows]
        kinds = [type(row).__name__ for row in rows]
        return DataProto.from_dict(tensors={"sums": torch.tensor(sums)}, non_tensors={"kinds": objects(kinds)})

    @register(dispatch_mode=MESH, blocking=False)
    def later(self, data: DataProto) -> DataProto:
        return DataProto.from_dict(tensors={"later": data.batch["input_ids"] * 2})

    @register_of_verl(dispatch_mode=MESH)
    def by_hand(self, data: Any) -> Any:
        """As one writes it with verl's own register, and looks into the columns that one needs."""
        return put(
            DataProto.from_dict(tensors={"first": data.batch["input_ids"][:, 0]}, meta_info={"of": type(data).__name__})
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def every_rank(self, data: DataProto) -> DataProto:
        return data.select(["input_ids"], [])

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def metric(self, data: DataProto) -> int:
        return int(data.batch["input_ids"].sum())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def whole(self, data: DataProto) -> tuple[int, str]:
        return len(data), type(data).__name__

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def process(self) -> tuple[int, str]:
        return os.getpid(), plane().address
