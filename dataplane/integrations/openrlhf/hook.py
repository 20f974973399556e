"""References in place of data between OpenRLHF's controller and its workers: `install()`, once, in the driver.

    from dataplane.integrations import openrlhf as references
    references.install()          # before train(args); or run `python -m dataplane.integrations.openrlhf` in its place

`RayActorGroup.async_run_method_batch` slices its arguments, puts each slice into Ray's object store, and its workers
take items out of the slices one by one. `install` passes `RemoteList`s in place of lists. OpenRLHF's own code slices,
pickles and indexes them, so a worker needs only this package: a slice has a few hundred bytes, and an item is read from
the memory of the worker's host.

The process that calls the groups is an actor of its own (PPOTrainer, TrainingActor). It gets the groups pickled, and
unpickling one installs the hook there.

Invariants: arguments and results are the same as without the hook, except that the inputs of a vision-language model
are handles; `uninstall` restores the original in this process; without a node, `install` or the creation of a group
raises an error that says what to do, before any model is loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dataplane.client.sync import Plane
from dataplane.config import NodeConfig, environment
from dataplane.errors import Misuse
from dataplane.integrations import process
from dataplane.integrations.openrlhf.remote import RemoteList, SentRows

_lock = threading.RLock()
_originals: dict[str, Any] = {}  # of RayActorGroup: the original of each replaced name, None if it was inherited
_sent_rows: SentRows | None = None
_config: NodeConfig | None = None


def install(config: NodeConfig | None = None) -> None:
    """Let the `RayActorGroup`s of this process, and of processes that get one from it, send references instead of
    data. Idempotent.

    The first group that the driver creates starts a dataplane node on each host of Ray, unless there is one or
    $DATAPLANE_ADDRESS names one. config: the settings of these nodes. None: chosen for each host.

    Raises Misuse if OpenRLHF is not installed, or its `RayActorGroup` has no `async_run_method_batch`.
    """
    global _config
    kind = _group()
    with _lock:
        _config = config or _config
        if _originals:
            return
        if not callable(getattr(kind, "async_run_method_batch", None)):
            raise Misuse("this version of OpenRLHF has no RayActorGroup.async_run_method_batch: see docs/openrlhf.md")
        for name, make in (("__init__", _init), ("async_run_method_batch", _batch), ("__reduce__", _reduce)):
            _originals[name] = kind.__dict__.get(name)
            setattr(kind, name, make(getattr(kind, name)))


def uninstall() -> None:
    """Let the groups of this process send slices again. Idempotent. Earlier references stay readable while their
    samples live."""
    global _sent_rows, _config
    with _lock:
        for name, original in _originals.items():
            if original is None:
                delattr(_group(), name)
            else:
                setattr(_group(), name, original)
        _originals.clear()
        _sent_rows = _config = None


def installed() -> bool:
    """Whether the groups of this process send references."""
    return bool(_originals)


def _group() -> Any:
    try:
        from openrlhf.trainer.ray.launcher import RayActorGroup
    except ImportError as error:
        missing = error.name if error.name and not error.name.startswith("openrlhf") else "openrlhf==0.11.2"
        raise Misuse(f"OpenRLHF cannot be imported ({error}): pip install {missing}") from error
    return RayActorGroup


def _init(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        _begin()
        original(self, *arguments, **options)

    return __init__


def _begin() -> None:
    """Start a node on each Ray node, with the settings of `install`, and connect this process."""
    global _config
    with _lock:
        if _config is not None and environment().address is None:
            from dataplane.integrations import ray as nodes

            nodes.up(_config)
            _config = None
        process.plane()


def _batch(original: Callable[..., Any]) -> Callable[..., Any]:
    def async_run_method_batch(self: Any, method_name: str, **arguments: Any) -> Any:
        return _Results(original(self, method_name, **_sent(arguments)), arguments)

    return async_run_method_batch


class _Results(list[Any]):
    """The pending results of the workers. It keeps the sent references alive: their rows are freed with it."""

    def __init__(self, results: Iterable[Any], sent: Mapping[str, Any]) -> None:
        super().__init__(results)
        self.sent = sent


def _reduce(_: Callable[..., Any]) -> Callable[..., Any]:
    def __reduce__(self: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _arrived, (type(self), self.__dict__)

    return __reduce__


def _arrived(kind: Any, state: Mapping[str, Any]) -> Any:
    """Unpickle a group, in a process that then sends references too."""
    install()
    group = kind.__new__(kind)
    group.__dict__.update(state)
    return group


def _sent(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with each list stored in the plane."""
    with _lock:
        sent = _sent_to(process.plane())
        return {
            name: RemoteList.of(name, value, sent) if type(value) is list and value else value
            for name, value in arguments.items()
        }


def _sent_to(plane: Plane) -> SentRows:
    global _sent_rows
    if _sent_rows is None or _sent_rows.plane is not plane:
        _sent_rows = SentRows(plane)
    return _sent_rows
