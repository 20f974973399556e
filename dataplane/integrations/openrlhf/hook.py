"""What OpenRLHF's controller sends to its workers goes by reference: `install()`, once, in the driver.

    from dataplane.integrations import openrlhf as door
    door.install()          # before train(args); or run `python -m dataplane.integrations.openrlhf` in its place

`RayActorGroup.async_run_method_batch` slices its arguments, puts each slice into Ray's object store, and its workers
take items out of them one by one. `install` hands it `RemoteList`s instead of lists. They are sliced, pickled and
looked into by OpenRLHF's own code, so a worker needs nothing but this package: a slice is a few hundred bytes, and an
item is read from the memory of the worker's host when it is taken.

The process that calls the groups is an actor of its own (PPOTrainer, TrainingActor). It gets the groups pickled, and
the groups bring the hook: unpickling one installs it there.

Invariants: arguments and results are those that they were without it, but that the inputs of a vision-language
model arrive as handles; `uninstall` puts back what was there, in this process; without a node, `install` or making
a group raises what to do about it, before any model is loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dataplane.client.sync import Plane
from dataplane.config import NodeConfig, environment
from dataplane.errors import Misuse
from dataplane.integrations import process
from dataplane.integrations.openrlhf.ledger import Ledger
from dataplane.integrations.openrlhf.remote import RemoteList

_lock = threading.RLock()
_originals: dict[str, Any] = {}  # of RayActorGroup: what each replaced name was, None where it was inherited
_ledger: Ledger | None = None
_config: NodeConfig | None = None


def install(config: NodeConfig | None = None) -> None:
    """From now on the groups of this process, and of those that get one from it, send references. Idempotent.

    The first group that the driver makes puts a node on each Ray node, unless one is there or $DATAPLANE_ADDRESS names
    one. config: the settings of these nodes. None: those that suit each host.

    Raises Misuse where OpenRLHF is not installed, or this version of it has no such method.
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
    """The groups of this process send slices again. Idempotent. What was sent stays readable while its samples live."""
    global _ledger, _config
    with _lock:
        for name, original in _originals.items():
            if original is None:
                delattr(_group(), name)
            else:
                setattr(_group(), name, original)
        _originals.clear()
        _ledger = _config = None


def installed() -> bool:
    """Whether the groups of this process send references."""
    return bool(_originals)


def _group() -> Any:
    try:
        from openrlhf.trainer.ray.launcher import RayActorGroup
    except ImportError as error:
        raise Misuse(f"OpenRLHF can not be imported ({error}): pip install openrlhf==0.11.2") from error
    return RayActorGroup


def _init(original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *arguments: Any, **options: Any) -> None:
        _begin()
        original(self, *arguments, **options)

    return __init__


def _begin() -> None:
    """Have a node on each Ray node, with the settings that `install` was given, and this process connected."""
    global _config
    with _lock:
        if _config is not None and environment().address is None:
            from dataplane.integrations import ray as door

            door.up(_config)
            _config = None
        process.plane()


def _batch(original: Callable[..., Any]) -> Callable[..., Any]:
    def async_run_method_batch(self: Any, method_name: str, **arguments: Any) -> Any:
        return _Results(original(self, method_name, **_sent(arguments)), arguments)

    return async_run_method_batch


class _Results(list[Any]):
    """What is awaited of the workers. It keeps what was sent to them: what they read of it is freed with it."""

    def __init__(self, results: Iterable[Any], sent: Mapping[str, Any]) -> None:
        super().__init__(results)
        self.sent = sent


def _reduce(_: Callable[..., Any]) -> Callable[..., Any]:
    def __reduce__(self: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _arrived, (type(self), self.__dict__)

    return __reduce__


def _arrived(kind: Any, state: Mapping[str, Any]) -> Any:
    """A group, in a process that is to send references too."""
    install()
    group = kind.__new__(kind)
    group.__dict__.update(state)
    return group


def _sent(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with each list as one that is in the plane."""
    with _lock:
        ledger = _ledger_of(process.plane())
        return {
            name: RemoteList.of(name, value, ledger) if type(value) is list and value else value
            for name, value in arguments.items()
        }


def _ledger_of(plane: Plane) -> Ledger:
    global _ledger
    if _ledger is None or _ledger.plane is not plane:
        _ledger = Ledger(plane)
    return _ledger
