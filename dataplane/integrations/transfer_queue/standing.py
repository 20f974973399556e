"""Standing in for the module `transfer_queue`, so that code written for it runs unchanged.

`install()` puts this package into `sys.modules` under that name, with the submodules that users import from, and sets
an environment variable, which a process started from this one inherits. There, `if_asked()` does the same: the entry
point `verl.plugins` calls it in every process that imports verl (`plugin`), and so does the first import of
`transfer_queue` in a worker of a Ray that is initialised afterwards (`workers`). `uninstall()` puts all of it back.

What always holds: verl's modules have the names of one system, whichever was imported first: those that were imported
before `install()` have TransferQueue's, or verl's own stand-in for a missing one, and are set anew. Other modules keep
what they have, and a warning says which: verl's functions take what they make for data. Where TransferQueue itself runs
in this process, nothing stands in for it.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from contextlib import suppress
from types import ModuleType

from dataplane.errors import Misuse

log = logging.getLogger(__name__)

VARIABLE = "DATAPLANE_TRANSFER_QUEUE"
"""What is in the environment where this package stands in: "nested" or "dense", as which what was put dense comes."""

_HERE = __package__
_NAME = "transfer_queue"
_SUBMODULES = {
    "client": "client",
    "interface": "interface",
    "metrics": "metrics",
    "metadata": "metadata",
    "sampler": "samplers",
    "sampler.base": "samplers",
    "sampler.sequential_sampler": "samplers",
    "sampler.grpo_group_n_sampler": "samplers",
    "sampler.rank_aware_sampler": "samplers",
    "sampler.seqlen_balanced_sampler": "samplers",
    "dataloader": "streaming",
    "dataloader.streaming_dataset": "streaming",
    "dataloader.streaming_dataloader": "streaming",
    "storage": "errors",
    "utils": "logging_utils",
    "utils.logging_utils": "logging_utils",
}
_BOUND = ("tq", "BatchMeta", "KVBatchMeta")  # what verl's modules take from it at their head

_before: dict[str, ModuleType] = {}
"""The modules in whose places ours are."""


def install(*, dense: bool = False) -> None:
    """Stand in for `transfer_queue` in this process, and in those that it starts and that ask (`if_asked`). Idempotent.

    dense: what was put dense comes back dense. By default it comes back nested, as TransferQueue gives it and as verl's
    trainer takes for granted. Raises Misuse where TransferQueue itself has been initialised in this process.
    """
    here = importlib.import_module(str(_HERE))
    first = sys.modules.get(_NAME) is not here
    if first:
        _refuse_where_it_runs()
        _before.update({name: sys.modules.pop(name) for name in _loaded()})
    os.environ[VARIABLE] = "dense" if dense else "nested"
    importlib.import_module(f"{_HERE}.workers").arrange()
    sys.modules[_NAME] = here
    for name, own in _SUBMODULES.items():
        sys.modules[f"{_NAME}.{name}"] = importlib.import_module(f"{_HERE}.{own}")
    _rebind(here)
    if first:
        _tell_who_keeps_theirs()


def uninstall() -> None:
    """Undo `install`: this process, and those that it starts, have TransferQueue itself again. Idempotent.

    Where that is not installed, verl's modules keep ours.
    """
    os.environ.pop(VARIABLE, None)
    importlib.import_module(f"{_HERE}.workers").withdraw()
    if sys.modules.get(_NAME) is not importlib.import_module(str(_HERE)):
        return
    for name in _loaded():
        del sys.modules[name]
    sys.modules.update(_before)
    _before.clear()
    if "verl" in sys.modules:
        with suppress(ImportError):
            _rebind(importlib.import_module(_NAME))


def if_asked() -> bool:
    """Stand in where the environment says so; whether it does."""
    asked = os.environ.get(VARIABLE, "")
    if asked:
        install(dense=asked == "dense")
        log.warning("dataplane stands in for transfer_queue in this process (%s=%s)", VARIABLE, asked)
    return bool(asked)


def is_in() -> bool:
    """Whether this package is the module `transfer_queue` of this process."""
    return sys.modules.get(_NAME) is sys.modules.get(str(_HERE))


def dense() -> bool:
    """Whether what was put dense comes back dense where `init` is not told."""
    return os.environ.get(VARIABLE) != "nested"


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == _NAME]


def _refuse_where_it_runs() -> None:
    """Raises Misuse where TransferQueue's client is connected: its controller would be asked for rows that are here."""
    interface = sys.modules.get(f"{_NAME}.interface")
    if getattr(interface, "_TQ_CLIENT", None) is not None:
        raise Misuse(
            "TransferQueue itself is initialised in this process, so dataplane can not stand in for it: call"
            " dataplane.integrations.transfer_queue.install() before transfer_queue.init(), or transfer_queue.close()"
            " first"
        )


def _rebind(there: ModuleType) -> None:
    """Give verl's modules that are loaded already the names of this one instead of those that they have."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "verl" and isinstance(module, ModuleType):
            for bound in _BOUND:
                if bound in module.__dict__:
                    setattr(module, bound, there if bound == "tq" else getattr(there, bound))


def _tell_who_keeps_theirs() -> None:
    """Warn of modules that are neither verl's nor TransferQueue's and have names of what ours are in place of."""
    theirs = [_before.get(_NAME), *(getattr(_before.get(_NAME), name, None) for name in _BOUND)]
    known = {id(each) for each in theirs if each is not None}
    keep = [
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in (_NAME, "verl")
        and any(id(getattr(module, "__dict__", {}).get(bound)) in known for bound in (_NAME, *_BOUND))
    ]
    if keep:
        log.warning(
            "%s imported transfer_queue before install(), and keeps TransferQueue itself: verl takes what it makes for"
            " data. Call install() before that import",
            ", ".join(keep),
        )
