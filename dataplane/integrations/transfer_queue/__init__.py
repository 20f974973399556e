"""TransferQueue's calls on a plane, without a controller: its metadata and samplers, and a client of our own.

    import dataplane.integrations.transfer_queue as tq     # instead of: import transfer_queue as tq

    tq.init()
    tq.kv_batch_put(keys, "train", fields=tensordict, tags=tags)
    data = tq.kv_batch_get(keys, "train")

`install()` replaces the calls of the module `transfer_queue` itself, for code that must not be changed. A partition
is a table of the plane. `docs/transfer_queue.md` lists the differences from TransferQueue 0.1.11. The package of
TransferQueue is imported at the first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dataplane.integrations.transfer_queue.checkpoint import load_checkpoint, save_checkpoint
from dataplane.integrations.transfer_queue.client import AsyncTransferQueueClient, TransferQueueClient, get_client
from dataplane.integrations.transfer_queue.errors import (
    NoKey,
    NoSampleInTime,
    NotStarted,
    NotThere,
    StorageKeyNotFoundError,
)
from dataplane.integrations.transfer_queue.kv import (
    async_kv_batch_get,
    async_kv_batch_get_by_meta,
    async_kv_batch_put,
    async_kv_clear,
    async_kv_list,
    async_kv_put,
    kv_batch_get,
    kv_batch_get_by_meta,
    kv_batch_put,
    kv_clear,
    kv_list,
    kv_put,
)
from dataplane.integrations.transfer_queue.module_patch import if_asked, install, uninstall
from dataplane.integrations.transfer_queue.session import close, get_metrics_endpoint, init

if TYPE_CHECKING:
    from transfer_queue import (
        BaseSampler,
        BatchMeta,
        GRPOGroupNSampler,
        KVBatchMeta,
        RankAwareSampler,
        SeqlenBalancedSampler,
        SequentialSampler,
    )

    from dataplane.integrations.transfer_queue.streaming import StreamingDataLoader, StreamingDataset

_THEIRS = {
    *("BatchMeta", "KVBatchMeta", "__version__", "BaseSampler"),
    *("GRPOGroupNSampler", "RankAwareSampler", "SeqlenBalancedSampler", "SequentialSampler"),
}
_DERIVED = {"StreamingDataLoader", "StreamingDataset"}  # from classes of theirs


def __getattr__(name: str) -> Any:
    if name in _THEIRS:
        return getattr(importlib.import_module("transfer_queue"), name)
    if name in _DERIVED:
        return getattr(importlib.import_module(f"{__name__}.streaming"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AsyncTransferQueueClient",
    "BaseSampler",
    "BatchMeta",
    "GRPOGroupNSampler",
    "KVBatchMeta",
    "NoKey",
    "NoSampleInTime",
    "NotStarted",
    "NotThere",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "StorageKeyNotFoundError",
    "StreamingDataLoader",
    "StreamingDataset",
    "TransferQueueClient",
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_put",
    "close",
    "get_client",
    "get_metrics_endpoint",
    "if_asked",
    "init",
    "install",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_put",
    "load_checkpoint",
    "save_checkpoint",
    "uninstall",
]
