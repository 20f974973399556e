"""Patches TransferQueue's client in places where it does not call its storage manager, or takes a slower path.

Invariants: a client with another storage manager is unchanged; a hook that this TransferQueue does not need, or
whose place in it has changed, is not installed.

Errors are raised for mistakes that TransferQueue ignores or reports poorly, in jobs with this backend
(`attach_checks`). The cause is only looked up after a call has failed; each error is also of a class that
TransferQueue's own calls raise (ValueError), and a Misuse.

The names of TransferQueue that the backend uses are listed here. `differences` looks at the installed code and not at a
version number. The backend works with a TransferQueue without differences; any other is refused, or replaced by its
own storage, at the start of a job (`plugin.start`) and never later.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from dataplane.config import environment
from dataplane.errors import Misuse, PeerUnavailable
from dataplane.integrations import process
from dataplane.integrations.transfer_queue.errors import NotThere
from dataplane.integrations.transfer_queue.settings import OTHERS, at, nearest
from dataplane.integrations.verl.settings import NAME

_MARK = "__wrapped_by_dataplane__"
_TAKES = ["self", "data", "metadata", "partition_id", "data_parser"]
_LOOKS_UP = ["self", "keys", "partition_id", "create"]


def attach() -> None:
    """Let clients call `replace_state` of their storage manager around the load of the controller's state, the last
    step of a load; `put_tagged` for rows and their tags; `retrieve` for keys; and `look` before the controller
    deletes rows, where it does so before they are freed. Idempotent."""
    from transfer_queue.client import AsyncTransferQueueClient as Client

    if _taken(Client.async_put) == _TAKES:
        _wrap(Client, "async_put", _putting)
    if _taken(Client.async_kv_retrieve_meta) == _LOOKS_UP:
        _wrap(Client, "async_kv_retrieve_meta", _retrieving)
    if has_checkpoints():
        _wrap(Client, "async_load_controller_checkpoint", _loading)
    else:
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


_AGAIN = (
    "TransferQueue's client is that of a Ray which was shut down: call transfer_queue.close() and transfer_queue.init()"
)


def attach_checks() -> None:
    """Wrap `init` and the reads by key. Idempotent."""
    import transfer_queue
    from transfer_queue import interface

    _wrap_function(transfer_queue, interface, "init", _init)
    _wrap_function(transfer_queue, interface, "async_kv_batch_get", _get)


def _init(theirs: Callable[..., Any]) -> Callable[..., Any]:
    of: list[Any] = [None]  # the Ray job of the current client

    @wraps(theirs)
    def init(conf: Any = None) -> Any:
        from transfer_queue import interface

        if conf is not None:
            _check_backend(conf)
        if _is_ours(interface._TQ_CLIENT) and of[0] not in (None, process.ray_job()):
            raise PeerUnavailable(_AGAIN, address="ray")
        made = theirs(conf)
        of[0] = process.ray_job()
        if made is conf and _is_ours(interface._TQ_CLIENT):  # the controller was there
            _check_job(interface._TQ_CONTROLLER)
            if conf is not None:
                _check_same(conf, interface._TQ_CONTROLLER)
        return made

    return init


def _check_backend(conf: Any) -> None:
    """Raises Misuse for an unknown backend, which TransferQueue only logs, after it has created its controller."""
    from transfer_queue.storage.managers.base import StorageManagerFactory

    known = list(dict.fromkeys([NAME, *OTHERS, *getattr(StorageManagerFactory, "_registry", ())]))
    named = at(conf, "backend.storage_backend")
    if named is not None and named not in known:
        raise Misuse(f"there is no backend {named!r}: {nearest(named, known)}")
    for part in _names(at(conf, "backend")):
        if part not in ("storage_backend", *known) and difflib.get_close_matches(part, [NAME], 1, 0.7):
            raise Misuse(f"there is no setting 'backend.{part}': did you mean backend.{NAME}?")


def _check_job(controller: Any) -> None:
    """Raises Misuse if the controller belongs to another Ray job, whose nodes store its rows."""
    import ray

    of, own = controller._actor_id.job_id.hex(), ray.get_runtime_context().get_job_id()
    if of != own and environment().address is None:
        raise Misuse(
            f"the TransferQueue of this Ray cluster is that of Ray job {of}, and this is {own}: rows of one job are not"
            " there for another. Close that one first, or start a Ray for each job; or start a node (`dataplane node`)"
            " and give both jobs its address in DATAPLANE_ADDRESS, and they share all keys"
        )


def _check_same(conf: Any, controller: Any) -> None:
    """Raises Misuse for a setting that contradicts that of the first `init`."""
    import ray

    held = ray.get(controller.get_config.remote())
    paths = ["backend.storage_backend", "controller.polling_mode", "controller.sampler"]
    paths += [f"backend.{NAME}.{name}" for name in _names(at(conf, f"backend.{NAME}"))]
    for path in paths:
        given, holds = at(conf, path), at(held, path)
        if given is not None and given != holds and isinstance(given, str | int | float):
            raise Misuse(
                f"TransferQueue was initialised with {path} = {holds}, and not {given}: leave it out, or call"
                " transfer_queue.close() in the process that initialised it first, and then init()"
            )


def _get(theirs: Callable[..., Any]) -> Callable[..., Any]:
    taken = inspect.signature(theirs)

    @wraps(theirs)
    async def get(*arguments: Any, **named: Any) -> Any:
        try:
            got = await theirs(*arguments, **named)
        except ValueError as error:
            if why := await _missing(taken.bind(*arguments, **named).arguments):
                raise NotThere(why) from error
            raise
        if not len(got.keys()) and (why := await _missing(taken.bind(*arguments, **named).arguments)):
            raise NotThere(why)
        return got

    return get


async def _missing(asked: Mapping[str, Any]) -> str:
    """The missing keys and fields, as text; empty if none is missing now, or if the client uses another storage."""
    from transfer_queue import interface

    client = interface._TQ_CLIENT
    if not _is_ours(client):
        return ""
    keys, partition, select = _listed(asked["keys"]), asked["partition_id"], asked.get("select_fields")
    there: Mapping[str, Mapping[str, Any]] = await interface.async_kv_list()
    if partition not in there:
        why = "nothing was put there, or all of it was cleared"
        return f"there is no partition {partition!r}: {why}; {nearest(partition, there)}"
    known = there[partition]
    if missing := [key for key in keys if key not in known]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        why = "not put yet, or cleared"
        return f"partition {partition!r} has no key {missing[0]!r}{more}: {why}; {nearest(missing[0], known)}"
    fields = sorted((await client.async_kv_retrieve_meta(keys=keys, partition_id=partition)).field_names)
    unknown = [name for name in _listed(select or ()) if name not in fields]
    if not unknown:
        return ""
    named = ", ".join(unknown)
    return (
        f"not all of these {len(keys)} keys of {partition!r} have {named}: put it first; {nearest(unknown[0], fields)}"
    )


def _is_ours(client: Any) -> bool:
    """Whether there is a client, and its storage is this backend."""
    return type(getattr(client, "storage_manager", None)).__name__ == "DataplaneStorageManager"


def _listed(names: Any) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _names(part: Any) -> Iterator[str]:
    return iter(map(str, part.keys())) if hasattr(part, "keys") else iter(())


def _wrap_function(package: Any, interface: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Wrap the function in TransferQueue's module and, if the package has the same, there."""
    theirs = getattr(interface, name)
    if hasattr(theirs, _MARK):
        return
    call = around(theirs)
    setattr(call, _MARK, True)
    setattr(interface, name, call)
    if getattr(package, name, None) is theirs:
        setattr(package, name, call)


#: By module, the names that the backend uses.
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
    """The parts that this TransferQueue lacks, as text; empty if the backend works with it.

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
    """Whether this TransferQueue writes checkpoints, as 0.1.9 and later do. Earlier versions delete rows at the
    controller first and clear the storage after."""
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
