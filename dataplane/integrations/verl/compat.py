"""The names of TransferQueue that the backend uses.

Invariants: `differences` looks at the installed code and not at a version number, imports what it looks at, and changes
nothing. The backend works with a TransferQueue without differences; any other is refused, or replaced by its own
storage, at the start of a job (`plugin.start`) and never later.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

#: By module, names of what it has.
_NAMES: dict[str, tuple[str, ...]] = {
    "metadata": (
        "extract_field_schema",
        *("BatchMeta.global_indexes", "BatchMeta.partition_ids", "BatchMeta.field_schema", "BatchMeta.field_names"),
        *("BatchMeta.size", "BatchMeta._custom_backend_meta"),
    ),
    "storage.managers.base": (
        *("StorageManager.put_data", "StorageManager.get_data", "StorageManager.clear_data", "StorageManager.close"),
        "StorageManagerFactory.register",
    ),
    "storage.bootstrap.provider": ("StorageBootstrapProvider.register_provider",),
    "utils.zmq_utils": (
        *("ZMQMessage.create", "ZMQMessage.serialize", "ZMQMessage.deserialize", "ZMQServerInfo.to_addr"),
        *("ZMQRequestType.NOTIFY_DATA_UPDATE", "ZMQRequestType.NOTIFY_DATA_UPDATE_ACK"),
        *("ZMQRequestType.GET_PARTITION_META", "ZMQRequestType.GET_PARTITION_META_RESPONSE"),
        *("ZMQRequestType.GET_PRODUCTION", "ZMQRequestType.PRODUCTION_RESPONSE"),
    ),
    "client": ("AsyncTransferQueueClient._clear_meta_in_controller",),
}
_OF_CHECKPOINTS: dict[str, tuple[str, ...]] = {
    "utils.zmq_utils": (
        *("ZMQRequestType.SAVE_CONTROLLER_CHECKPOINT", "ZMQRequestType.SAVE_CONTROLLER_CHECKPOINT_RESPONSE"),
        *("ZMQRequestType.GET_LIST_PARTITIONS", "ZMQRequestType.LIST_PARTITIONS_RESPONSE"),
        *("ZMQRequestType.CLEAR_META", "ZMQRequestType.CLEAR_META_RESPONSE"),
    ),
    "client": ("AsyncTransferQueueClient.async_load_controller_checkpoint",),
}


def differences() -> list[str]:
    """What this TransferQueue lacks, as text; empty if the backend works with it.

    Raises ImportError without TransferQueue.
    """
    import_module("transfer_queue")
    needed = [_NAMES, _OF_CHECKPOINTS] if _is_there("storage.managers.base", _CHECKPOINT) else [_NAMES]
    return [
        f"there is no {module}.{name}"
        for each in needed
        for module, names in each.items()
        for name in names
        if not _is_there(module, name)
    ]


def versions() -> str:
    """The installed packages and their versions."""
    return f"dataplane {_version('rollout-dataplane')} and TransferQueue {_version('TransferQueue')}"


_CHECKPOINT = "StorageManager.load_checkpoint"


def has_checkpoints() -> bool:
    """Whether this TransferQueue writes checkpoints, as 0.1.9 and later do. One that does not deletes rows at the
    controller before it clears the storage."""
    return _is_there("storage.managers.base", _CHECKPOINT)


def _is_there(module: str, name: str) -> bool:
    found: Any
    try:
        found = import_module(f"transfer_queue.{module}")
    except ImportError:
        return False
    for part in name.split("."):
        if not hasattr(found, part):
            return part in getattr(found, "__annotations__", ())  # of a field of a data class
        found = getattr(found, part)
    return True


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of no known version"
