"""The parts of TransferQueue that the backend uses: each name with its arguments, and each request.

Invariants: `differences` inspects the installed code and not a version number, imports what it inspects, and changes
nothing. The backend works with a TransferQueue without differences; any other is refused, or replaced by its own
storage, at the start of a job (`plugin.start`) and never later.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

#: Callables, and what they are called with: (module, name, positional arguments, keywords).
_CALLED: tuple[tuple[str, str, int, tuple[str, ...]], ...] = (
    ("metadata", "extract_field_schema", 1, ()),
    ("storage.managers.base", "StorageManager.__init__", 3, ()),
    ("storage.managers.base", "StorageManager.close", 1, ()),
    ("storage.managers.base", "StorageManagerFactory.register", 1, ()),
    ("storage.bootstrap.provider", "StorageBootstrapProvider.register_provider", 1, ()),
    ("utils.zmq_utils", "ZMQMessage.create", 0, ("request_type", "sender_id", "receiver_id", "body")),
    ("utils.zmq_utils", "ZMQMessage.serialize", 1, ()),
    ("utils.zmq_utils", "ZMQMessage.deserialize", 1, ()),
    ("utils.zmq_utils", "ZMQServerInfo.to_addr", 2, ()),
    ("utils.zmq_utils", "create_zmq_socket", 0, ("ctx", "socket_type", "ip", "identity")),
)
#: What the backend overrides, and what TransferQueue calls it with, the manager itself left out.
_OVERRIDDEN = {
    "put_data": ("data", "metadata", "data_parser"),
    "get_data": ("metadata",),
    "clear_data": ("metadata",),
}
_READ = ("global_indexes", "partition_ids", "field_schema", "field_names", "size", "_custom_backend_meta")
_REQUESTS = (
    "NOTIFY_DATA_UPDATE",
    "NOTIFY_DATA_UPDATE_ACK",
    "GET_PARTITION_META",
    "GET_PARTITION_META_RESPONSE",
    "GET_PRODUCTION",
    "PRODUCTION_RESPONSE",
)
_CHECKPOINTS = (
    "SAVE_CONTROLLER_CHECKPOINT",
    "SAVE_CONTROLLER_CHECKPOINT_RESPONSE",
    "GET_LIST_PARTITIONS",
    "LIST_PARTITIONS_RESPONSE",
    "CLEAR_META",
    "CLEAR_META_RESPONSE",
)


def differences() -> list[str]:
    """What this TransferQueue lacks, as text; empty if the backend works with it.

    Raises ImportError without TransferQueue.
    """
    import_module("transfer_queue")
    return list(_differences())


def versions() -> str:
    """The installed packages and their versions."""
    return f"dataplane {_version('rollout-dataplane')} and TransferQueue {_version('TransferQueue')}"


def has_checkpoints() -> bool:
    """Whether this TransferQueue writes checkpoints, as 0.1.9 and later do."""
    from transfer_queue.storage.managers.base import StorageManager

    return hasattr(StorageManager, "load_checkpoint")


def forgets_first() -> bool:
    """Whether the client deletes rows at the controller before it clears the storage, as 0.1.8 does."""
    return not has_checkpoints()


def _differences() -> Iterator[str]:
    for module, name, count, keywords in _CALLED:
        called = _find(module, name)
        if called is None:
            yield f"there is no {module}.{name}"
        elif not _takes(called, count, keywords):
            yield f"{module}.{name} takes other arguments: {inspect.signature(called)}"
    base = _find("storage.managers.base", "StorageManager")
    for name, taken in _OVERRIDDEN.items():
        method = getattr(base, name, None)
        if method is None:
            yield f"a storage manager has no {name}"
        elif tuple(inspect.signature(method).parameters)[1:] != taken:
            yield f"a storage manager's {name} is given other arguments: {inspect.signature(method)}"
    meta = _find("metadata", "BatchMeta")
    known = {*getattr(meta, "__slots__", ()), *getattr(meta, "__annotations__", ()), *dir(meta)}
    yield from (f"a BatchMeta has no {name}" for name in _READ if name not in known)
    requests = _find("utils.zmq_utils", "ZMQRequestType")
    needed = _REQUESTS + (_CHECKPOINTS if hasattr(base, "load_checkpoint") else ())
    yield from (f"its controller knows no request {name}" for name in needed if not hasattr(requests, name))
    client = _find("client", "AsyncTransferQueueClient")
    if not hasattr(client, "_clear_meta_in_controller"):
        yield "its client clears rows in another way"
    if hasattr(base, "load_checkpoint") and not hasattr(client, "async_load_controller_checkpoint"):
        yield "its client does not load checkpoints of a controller"


def _find(module: str, name: str) -> Any:
    found: Any
    try:
        found = import_module(f"transfer_queue.{module}")
    except ImportError:
        return None
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _takes(called: Any, count: int, keywords: tuple[str, ...]) -> bool:
    """Whether it can be called with these arguments."""
    try:
        inspect.signature(called).bind(*[None] * count, **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of no known version"
