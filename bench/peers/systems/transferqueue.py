"""TransferQueue with its SimpleStorage: a key for each row, and a TensorDict for each put, with ragged columns as
jagged tensors.

verl calls `kv_batch_put` and `kv_batch_get`. Rows of pixels vary in one dimension, and are jagged too.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from typing import Any

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

from bench.peers.work import Columns

warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors")


class Server:
    """A Ray cluster of one node, with TransferQueue's controller and storage units."""

    def __init__(self, told: dict[str, Any]) -> None:
        started = ray.init(
            num_cpus=16, include_dashboard=False, object_store_memory=256 << 20, log_to_driver=False,
            namespace="bench", _temp_dir=told["scratch"], _node_ip_address="127.0.0.1",
        )  # fmt: skip
        tq.init()
        self.address = {"address": started["address"] if isinstance(started, dict) else started.address_info["address"]}

    def close(self) -> None:
        """End TransferQueue and the cluster."""
        tq.close()
        ray.shutdown()


class Door:
    """A client of TransferQueue."""

    def __init__(self, address: dict[str, Any]) -> None:
        ray.init(address=address["address"], namespace="bench", log_to_driver=False)
        tq.init()

    def put(self, name: str, columns: Columns, parts: int) -> Sequence[str]:
        """Put all rows at once."""
        rows = len(next(iter(columns.values())))
        keys = [f"{name}/{i}" for i in range(rows)]
        fields = TensorDict({column: _tensor(values) for column, values in columns.items()}, batch_size=[rows])
        tq.kv_batch_put(keys, "bench", fields=fields)
        return [json.dumps(keys[rows * i // parts : rows * (i + 1) // parts]) for i in range(parts)]

    def get(self, token: str) -> Columns:
        """All fields of the rows."""
        data = tq.kv_batch_get(json.loads(token), "bench")
        return {column: _arrays(data[column]) for column in data.keys()}  # noqa: SIM118 - a TensorDict iterates over rows

    def drop(self, tokens: Sequence[str]) -> None:
        """Clear the rows."""
        tq.kv_clear([key for token in tokens for key in json.loads(token)], "bench")

    def close(self) -> None:
        """Disconnect from the cluster."""
        ray.shutdown()


def _tensor(values: Any) -> torch.Tensor:
    if isinstance(values, list):
        return torch.nested.as_nested_tensor([torch.from_numpy(row) for row in values], layout=torch.jagged)
    return torch.from_numpy(values)


def _arrays(tensor: torch.Tensor) -> Any:
    return [row.numpy() for row in tensor.unbind()] if tensor.is_nested else tensor.numpy()
