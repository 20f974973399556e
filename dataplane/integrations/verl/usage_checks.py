"""Errors for mistakes that TransferQueue ignores or reports poorly, in jobs with this backend.

Invariants: everything else that TransferQueue does is unchanged, and so is a job with another storage; the cause is
only looked up after a call has failed; each error is also of a class that TransferQueue's own calls raise
(ValueError), and a Misuse.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any

from dataplane.config import environment
from dataplane.errors import Misuse, PeerUnavailable
from dataplane.integrations import process
from dataplane.integrations.transfer_queue.errors import NotThere
from dataplane.integrations.transfer_queue.settings import OTHERS, at, nearest
from dataplane.integrations.verl.settings import NAME

_AGAIN = (
    "TransferQueue's client is that of a Ray which was shut down: call transfer_queue.close() and transfer_queue.init()"
)

_MARK = "__wrapped_by_dataplane__"


def attach() -> None:
    """Wrap `init` and the reads by key. Idempotent."""
    import transfer_queue
    from transfer_queue import interface

    _wrap(transfer_queue, interface, "init", _init)
    _wrap(transfer_queue, interface, "async_kv_batch_get", _get)


def _init(theirs: Callable[..., Any]) -> Callable[..., Any]:
    of: list[Any] = [None]  # the Ray job of the client that there is

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
    """The missing keys and fields, as text; empty if none is missing now, or the storage is another's."""
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


def _wrap(package: Any, interface: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Wrap the function in TransferQueue's module and, if the package has the same, there."""
    theirs = getattr(interface, name)
    if hasattr(theirs, _MARK):
        return
    call = around(theirs)
    setattr(call, _MARK, True)
    setattr(interface, name, call)
    if getattr(package, name, None) is theirs:
        setattr(package, name, call)
