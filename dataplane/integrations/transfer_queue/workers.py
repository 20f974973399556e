"""Standing in for `transfer_queue` in the workers of a Ray job, whatever they import.

`install()` names `environment_of_workers` in `$RAY_RUNTIME_ENV_HOOK`, which `ray.init()` calls in the driver. It gives
the job's workers the variables that children inherit, also where they are not children, and `stand_in` as the hook that
each calls as it starts. That imports nothing: the first import of `transfer_queue` does.

Invariants: hooks that were there before are called too. A Ray that was initialised before `install()` is out of
reach of this; there `board` tells.
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

from dataplane.integrations.transfer_queue import job, standing

_HOOK = "RAY_RUNTIME_ENV_HOOK"
_BEFORE = "DATAPLANE_RAY_RUNTIME_ENV_HOOK"  # the one that was there before ours
_OURS = f"{__name__}.environment_of_workers"
_NAME = "transfer_queue"


def arrange() -> None:
    """Let `ray.init()` of this process, and of its children, call `environment_of_workers`. Idempotent."""
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
    """The `runtime_env` of a Ray job, with what its workers need. Raises as `standing.install`, where the environment
    asks for that and this process has not done so."""
    before = os.environ.get(_BEFORE)
    if before:
        module, _, name = before.rpartition(".")
        runtime_env = getattr(importlib.import_module(module), name)(runtime_env)
    if not os.environ.get(standing.VARIABLE):
        return runtime_env
    if not standing.is_in():
        stand_in()
    found = dict(runtime_env or {})
    told = {name: os.environ[name] for name in (standing.VARIABLE, job.VARIABLE) if os.environ.get(name)}
    found["env_vars"] = {**told, **(found.get("env_vars") or {})}
    found["worker_process_setup_hook"] = _both(found.get("worker_process_setup_hook"))
    return found


def stand_in() -> None:
    """Stand in for `transfer_queue` as soon as it is imported, where the environment asks for that. Idempotent."""
    if _NAME in sys.modules:
        standing.if_asked()
    elif os.environ.get(standing.VARIABLE) and not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _both(user: Any) -> Any:
    """`stand_in`, and then the user's hook: a function, or the path of one."""
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
    """Finds TransferQueue as the others do, and stands in for it as soon as it is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As the import system asks for it."""
        if fullname != _NAME or f"{__package__}.streaming" in sys.modules:  # which imports it, and stands in itself
            return None
        others = [other for other in sys.meta_path if other is not self]
        spec = next(filter(None, (other.find_spec(fullname, path, target) for other in others)), None)
        loader: Any = spec.loader if spec is not None else None
        if loader is not None:
            run = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                standing.if_asked()

            loader.exec_module = exec_module
        return spec
