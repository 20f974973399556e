"""Replaces the calls of `transfer_queue` in the workers of a Ray job, whatever they import.

`install()` names `environment_of_workers` in `$RAY_RUNTIME_ENV_HOOK`, which `ray.init()` calls in the driver. It gives
all workers of the job the variables that children inherit, and `stand_in` as the hook that each worker calls at its
start. The hook imports nothing: the calls are replaced at the first import of `transfer_queue`.

Invariants: earlier hooks are called too. This does not reach a Ray that was initialised before `install()`; there
`job_registry` reports it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from dataplane.integrations.transfer_queue import job, module_patch

_HOOK = "RAY_RUNTIME_ENV_HOOK"
_BEFORE = "DATAPLANE_RAY_RUNTIME_ENV_HOOK"  # the one that was there before ours
_OURS = f"{__name__}.environment_of_workers"
_NAME = "transfer_queue"


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
    `module_patch.install` if the environment asks for the replacement and this process has not made it."""
    before = os.environ.get(_BEFORE)
    if before:
        module, _, name = before.rpartition(".")
        runtime_env = getattr(importlib.import_module(module), name)(runtime_env)
    if not os.environ.get(module_patch.VARIABLE):
        return runtime_env
    if not module_patch.is_in():
        stand_in()
    found = dict(runtime_env or {})
    told = {name: os.environ[name] for name in (module_patch.VARIABLE, job.VARIABLE) if os.environ.get(name)}
    found["env_vars"] = {**told, **(found.get("env_vars") or {})}
    found["worker_process_setup_hook"] = _both(found.get("worker_process_setup_hook"))
    return found


def stand_in() -> None:
    """Replace the calls of `transfer_queue` at its import, if the environment asks for that. Idempotent."""
    if _NAME in sys.modules:
        module_patch.if_asked()
    elif os.environ.get(module_patch.VARIABLE) and not any(isinstance(each, _Finder) for each in sys.meta_path):
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
        """See `importlib.abc.MetaPathFinder`."""
        if fullname != _NAME or f"{__package__}.streaming" in sys.modules:  # which imports it, and stands in itself
            return None
        others = [other for other in sys.meta_path if other is not self]
        spec = next(filter(None, (other.find_spec(fullname, path, target) for other in others)), None)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                module_patch.if_asked()

            loader.exec_module = exec_module
        return spec
