"""TransferQueue's calls, without TransferQueue: its names and what they mean, on a plane, with no controller.

    import dataplane.integrations.transfer_queue as tq     # instead of: import transfer_queue as tq

    tq.init()
    tq.kv_batch_put(keys, "train", fields=tensordict, tags=tags)
    data = tq.kv_batch_get(keys, "train")

`install()` stands in for the module `transfer_queue` itself, for code that is not to be changed. A partition is a table
of the plane. What differs from TransferQueue 0.1.11 is in `docs/transfer_queue.md`.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from dataplane.integrations.transfer_queue import interface
from dataplane.integrations.transfer_queue.client import TransferQueueClient
from dataplane.integrations.transfer_queue.errors import (
    NoKey,
    NoSampleInTime,
    NotStarted,
    NotThere,
    StorageKeyNotFoundError,
)
from dataplane.integrations.transfer_queue.interface import *  # noqa: F403  # the calls
from dataplane.integrations.transfer_queue.kvmeta import KVBatchMeta
from dataplane.integrations.transfer_queue.meta import BatchMeta
from dataplane.integrations.transfer_queue.samplers import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)
from dataplane.integrations.transfer_queue.standing import if_asked, install, uninstall

if TYPE_CHECKING:
    from dataplane.integrations.transfer_queue.streaming import StreamingDataLoader, StreamingDataset

__version__ = "0.1.11"
"""The version of TransferQueue whose calls these are."""

_LAZY = {"StreamingDataLoader": "streaming", "StreamingDataset": "streaming"}  # which are torch's classes too


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    if f"transfer_queue.{name}" in sys.modules and sys.modules.get("transfer_queue") is sys.modules[__name__]:
        return sys.modules[f"transfer_queue.{name}"]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
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
    "if_asked",
    "install",
    "uninstall",
]
__all__ += interface.__all__
