"""Changes to TransferQueue's client where it calls its storage manager too rarely or takes a slower path.

Invariants: a client with another storage manager is unchanged; a hook that this TransferQueue does not need, or
whose place in it has changed, is not installed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import numpy as np

from dataplane.integrations.verl import compat

_MARK = "__wrapped_by_dataplane__"
_TAKES = ["self", "data", "metadata", "partition_id", "data_parser"]
_LOOKS_UP = ["self", "keys", "partition_id", "create"]


def attach() -> None:
    """Let clients call `replace_state` of their storage manager around the load of the controller's state, the last
    step of a load; `put_tagged` for rows and their tags; `retrieve` for keys; and `look` before the controller
    deletes rows, where it does so before they are freed. Idempotent."""
    from transfer_queue.client import AsyncTransferQueueClient as Client

    if compat.has_checkpoints():
        _wrap(Client, "async_load_controller_checkpoint", _loading)
    if _taken(Client.async_put) == _TAKES:
        _wrap(Client, "async_put", _putting)
    if _taken(Client.async_kv_retrieve_meta) == _LOOKS_UP:
        _wrap(Client, "async_kv_retrieve_meta", _retrieving)
    if compat.forgets_first():
        _wrap(Client, "async_clear_samples", _clearing)


async def _loading(theirs: Any, client: Any, *arguments: Any, **named: Any) -> None:
    replace = getattr(getattr(client, "storage_manager", None), "replace_state", None)
    if replace is None:
        await theirs(client, *arguments, **named)
    else:
        await replace(lambda: theirs(client, *arguments, **named))


async def _putting(
    theirs: Any, client: Any, data: Any, metadata: Any = None, partition_id: Any = None, data_parser: Any = None
) -> Any:
    put = getattr(getattr(client, "storage_manager", None), "put_tagged", None)
    if put is None or not metadata or data_parser is not None or len(set(metadata.partition_ids)) != 1:
        return await theirs(client, data, metadata, partition_id, data_parser)
    schema = await put(data, metadata)
    return _added(metadata, schema) if _adds_the_same() else metadata.add_fields(data)


def _added(metadata: Any, schema: Any) -> Any:
    """The result of `BatchMeta.add_fields` for data with this schema."""
    metadata.field_schema.update(schema)
    metadata.production_status[:] = 1
    metadata._field_names = sorted(metadata.field_schema)
    metadata._is_ready = metadata.size > 0
    return metadata


@lru_cache(maxsize=1)
def _adds_the_same() -> bool:
    """Whether this `BatchMeta.add_fields` changes the same as `_added`."""
    from tensordict import TensorDict
    from transfer_queue.metadata import BatchMeta, extract_field_schema

    data = TensorDict({}, batch_size=[1]).set("x", np.zeros((1, 2)))
    ours, theirs = BatchMeta([0], ["p"]), BatchMeta([0], ["p"]).add_fields(data)
    _added(ours, extract_field_schema(data))
    names = getattr(BatchMeta, "__slots__", ())
    return bool(names) and all(getattr(ours, name) == getattr(theirs, name) for name in names)


async def _retrieving(theirs: Any, client: Any, keys: Any, partition_id: Any, create: Any = False, **named: Any) -> Any:
    retrieve = getattr(getattr(client, "storage_manager", None), "retrieve", None)
    given = [keys] if isinstance(keys, str) else keys
    if retrieve is None or named or not isinstance(given, list) or not all(isinstance(key, str) for key in given):
        return await theirs(client, keys, partition_id, create, **named)
    return await retrieve(given, partition_id, create) if given else await theirs(client, keys, partition_id, create)


async def _clearing(theirs: Any, client: Any, metadata: Any) -> None:
    look = getattr(getattr(client, "storage_manager", None), "look", None)
    if look is not None:
        await look(metadata)
    await theirs(client, metadata)


def _taken(call: Callable[..., Any]) -> list[str]:
    """Its parameters, except a socket of its own."""
    return [name for name in inspect.signature(inspect.unwrap(call)).parameters if name != "socket"]


def _wrap(owner: type, name: str, around: Any) -> None:
    theirs = getattr(owner, name)
    if hasattr(theirs, _MARK):
        return

    @wraps(theirs)
    async def call(self: Any, *arguments: Any, **named: Any) -> Any:
        return await around(theirs, self, *arguments, **named)

    setattr(call, _MARK, True)
    setattr(owner, name, call)
