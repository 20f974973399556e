"""Replaces the calls of the module `transfer_queue`, so that code written for it runs unchanged.

`install()` replaces TransferQueue's calls, client, data sets and errors by those of this package in all modules of this
process, and sets an environment variable that child processes inherit. `if_asked()` does the same in a process with
that variable. It is called by the entry point `verl.plugins` in each process that imports verl, and at the first import
of `transfer_queue` in a Ray worker, if Ray was initialised after `install()`. `uninstall()` reverts all of it.

A configuration that names this package does the same for one job (`watch`): `init()` of TransferQueue is replaced by
one that looks at the configuration, and the other calls only for such a job, until its `close()`.

For the workers of a Ray job, `install()` names `environment_of_workers` in `$RAY_RUNTIME_ENV_HOOK`, which `ray.init()`
calls in the driver: it gives all workers of the job the variables that children inherit, and `stand_in` as the hook
that each worker calls at its start. The calls are replaced at the first import of `transfer_queue`. Earlier hooks are
called too. In a worker of a Ray that was initialised before, the calls are replaced when TransferQueue itself looks for
its controller there, and finds the actor of `job_registry` (`take_over`).

The classes of metadata and samplers are not replaced.

Invariants: all modules of a process use the calls of one system, whenever they were imported. If TransferQueue itself
runs in this process, nothing is replaced.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from dataplane.config import environment
from dataplane.errors import Misuse
from dataplane.integrations import process
from dataplane.integrations.transfer_queue.settings import JOB_VARIABLE, NAME, at, names_this

log = logging.getLogger(__name__)

VARIABLE = "DATAPLANE_TRANSFER_QUEUE"
"""The environment variable of the replacement: "nested" or "dense", the form of tensors that were put dense."""

_HERE = str(__package__)
_NAME = "transfer_queue"

_theirs: dict[str, Any] = {}
"""The replaced originals; empty if nothing is replaced."""

_direct: set[tuple[str, str]] = set()
"""Modules, with the names of the calls, that had imported them from this package before the replacement."""

_for_job = False
"""Whether they were replaced for one job, until its `close()`."""


def install(*, dense: bool = False) -> None:
    """Replace the calls of `transfer_queue` in this process, and in child processes that call `if_asked`. Idempotent.

    dense: tensors that were put dense are returned dense. By default they are returned nested, as by TransferQueue,
    which verl's trainer relies on.

    Raises Misuse if TransferQueue itself has been initialised in this process.
    """
    theirs = importlib.import_module(_NAME)
    importlib.import_module(f"{_HERE}.streaming")  # which stands in, if this process is asked to
    # its controller would be asked for rows that are here
    if not is_in() and getattr(theirs.interface, "_TQ_CLIENT", None) is not None:
        raise Misuse(
            "TransferQueue itself is initialised in this process, so dataplane can not stand in for it: call"
            " dataplane.integrations.transfer_queue.install() before transfer_queue.init(), or transfer_queue.close()"
            " first"
        )
    global _for_job
    os.environ[VARIABLE] = "dense" if dense else "nested"
    arrange()
    _for_job = False
    if not is_in():
        here = importlib.import_module(_HERE)
        both = {name: getattr(theirs, name, getattr(theirs.client, name, None)) for name in here.__all__}
        _theirs.update({name: each for name, each in both.items() if each not in (None, getattr(here, name))})
        _direct.update((module, name) for module, name, _ in _held(_ours()))
        _exchange(_theirs, _ours())


def uninstall() -> None:
    """Undo `install`: this process, and those that it starts, use TransferQueue itself again. Idempotent."""
    global _for_job
    os.environ.pop(VARIABLE, None)
    withdraw()
    _exchange(_ours(), _theirs, but=_direct)
    _theirs.clear()
    _direct.clear()
    _for_job = False
    interface: Any = sys.modules.get(f"{_NAME}.interface")
    if type(getattr(interface, "_TQ_CLIENT", None)).__module__.startswith(_HERE):  # `take_over`
        interface._TQ_CLIENT = interface._TQ_CONTROLLER = None


_MARK = "__of_dataplane__"
"""The attribute of the `init` that `watch` has put into the place of TransferQueue's."""


def watch() -> None:
    """Replace `init` of `transfer_queue` by one that calls `install` and this package's `init`, if its configuration
    names this package, or names no backend in a Ray job that has rows here. Idempotent. Raises ImportError without
    TransferQueue."""
    theirs = importlib.import_module(f"{_NAME}.interface").init
    if is_in() or hasattr(theirs, _MARK):
        return

    @wraps(theirs)
    def init(conf: Any = None) -> Any:
        return _init(conf) if names_this(conf) or _continues(conf) else theirs(conf)

    setattr(init, _MARK, True)
    _exchange({"init": theirs}, {"init": init})


def _continues(conf: Any) -> bool:
    """Whether a configuration names no backend, and this Ray job has rows here but not the actor of `job_registry`,
    which TransferQueue would ask: that of another job had its name, and may have ended."""
    if at(conf, "backend.storage_backend") is not None or process.ray_job() is None:
        return False
    return bool(importlib.import_module(f"{_HERE}.session").has_rows())


def _init(conf: Any) -> Any:
    by_ray = "a node on each Ray node" if process.ray_job() is not None else "a node of this process"
    known = environment().address
    before = is_in()
    _install_for_job(dense=bool(at(conf, f"backend.{NAME}.dense")))
    try:
        made = importlib.import_module(_HERE).init(conf)
    except BaseException:
        if not before:
            leave()
        raise
    where = by_ray if known is None else f"the node at {known}, which has its own settings"
    _say(f"TransferQueue stores in the plane ({NAME}): by {where}")
    return made


def take_over(*, dense: bool) -> None:
    """Replace the calls in this process, while one of TransferQueue's own calls is about to make its client: that call
    finds this package's client."""
    _install_for_job(dense=dense)
    sys.modules[f"{_NAME}.interface"]._TQ_CLIENT = importlib.import_module(_HERE).TransferQueueClient()  # type: ignore[attr-defined]


def _install_for_job(*, dense: bool) -> None:
    global _for_job
    for_job = _for_job or not is_in()
    install(dense=dense)
    _for_job = for_job


def leave() -> None:
    """Undo the replacement if it was made for one job. Idempotent."""
    if _for_job:
        uninstall()


def _say(what: str) -> None:
    """Log a line at INFO, or write it to stderr where INFO is not shown."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", what)
    else:
        sys.stderr.write(f"dataplane: {what}\n")


def if_asked() -> bool:
    """Replace the calls if the environment says so. Returns whether it does."""
    asked = os.environ.get(VARIABLE, "")
    if asked:
        install(dense=asked == "dense")
        log.warning("dataplane replaces the module transfer_queue in this process (%s=%s)", VARIABLE, asked)
    return bool(asked)


def is_in() -> bool:
    """Whether the calls of the module `transfer_queue` in this process are those of this package."""
    return bool(_theirs)


def dense() -> bool:
    """Whether tensors that were put dense are returned dense if `init` does not say."""
    return os.environ.get(VARIABLE) != "nested"


def _ours() -> dict[str, Any]:
    """The names that this package replaces, with its own objects."""
    here = importlib.import_module(_HERE)
    return {name: getattr(here, name) for name in _theirs}


def _exchange(
    have: Mapping[str, Any], wanted: Mapping[str, Any], but: Container[tuple[str, str]] = frozenset()
) -> None:
    """In all modules except this package's, replace each object of `have` by that of `wanted` with the same name,
    except these (module, name)."""
    for module, name, names in list(_held(have)):
        if (module, name) not in but:
            names[name] = wanted[name]


def _held(have: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The modules, except this package's, that have one of these objects under its name: module, name, and the names
    of the module."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and not str(names.get("__name__")).startswith(_HERE):  # some are no modules
            yield from ((str(names.get("__name__")), name, names) for name in have if names.get(name) is have[name])


_HOOK = "RAY_RUNTIME_ENV_HOOK"
_BEFORE = "DATAPLANE_RAY_RUNTIME_ENV_HOOK"  # the one that was there before ours
_OURS = f"{__name__}.environment_of_workers"


def arrange() -> None:
    """Have `ray.init()` of this process and of its children call `environment_of_workers`. Idempotent."""
    before = os.environ.get(_HOOK)
    if before == _OURS:
        return
    if before:
        os.environ[_BEFORE] = before
    os.environ[_HOOK] = _OURS


def withdraw() -> None:
    """Undo `arrange`. Idempotent."""
    if os.environ.get(_HOOK) == _OURS:
        before = os.environ.pop(_BEFORE, None)
        if before is None:
            del os.environ[_HOOK]
        else:
            os.environ[_HOOK] = before


def environment_of_workers(runtime_env: Any) -> Any:
    """The `runtime_env` of a Ray job with the variables and the hook of its workers. Raises as
    `install` if the environment asks for the replacement and this process has not made it."""
    before = os.environ.get(_BEFORE)
    if before:
        module, _, name = before.rpartition(".")
        runtime_env = getattr(importlib.import_module(module), name)(runtime_env)
    if not os.environ.get(VARIABLE):
        return runtime_env
    if not is_in():
        stand_in()
    found = dict(runtime_env or {})
    variables = {name: os.environ[name] for name in (VARIABLE, JOB_VARIABLE) if os.environ.get(name)}
    found["env_vars"] = {**variables, **(found.get("env_vars") or {})}
    found["worker_process_setup_hook"] = _both(found.get("worker_process_setup_hook"))
    return found


def stand_in() -> None:
    """Replace the calls of `transfer_queue` at its import, if the environment asks for that. Idempotent."""
    if _NAME in sys.modules:
        if_asked()
    elif os.environ.get(VARIABLE) and not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _both(user: Any) -> Any:
    """`stand_in`, then the hook of the user: a function, or the path of one."""
    if user is None:
        return f"{__name__}.{stand_in.__name__}"

    def hook() -> None:
        stand_in()
        called: Callable[[], object] = user
        if isinstance(user, str):
            module, _, name = user.rpartition(".")
            called = getattr(importlib.import_module(module), name)
        called()

    return hook


class _Finder(MetaPathFinder):
    """A finder that replaces the calls of TransferQueue as soon as it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _NAME or f"{__package__}.streaming" in sys.modules:  # which imports it, and stands in itself
            return None
        others = [other for other in sys.meta_path if other is not self]
        spec = next(filter(None, (other.find_spec(fullname, path, target) for other in others)), None)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                if_asked()

            loader.exec_module = exec_module
        return spec
