"""The calls under the name of the module that TransferQueue has them in."""

from dataplane.integrations.transfer_queue.checkpoint import load_checkpoint, save_checkpoint
from dataplane.integrations.transfer_queue.client import get_client
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
from dataplane.integrations.transfer_queue.metrics import get_metrics_endpoint
from dataplane.integrations.transfer_queue.session import close, init

__all__ = [
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_put",
    "close",
    "get_client",
    "get_metrics_endpoint",
    "init",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_put",
    "load_checkpoint",
    "save_checkpoint",
]
