"""Standing in for the module `transfer_queue`, so that code written for it runs unchanged.

`install()` puts this package into `sys.modules` under that name, with the submodules that users import from, and sets
an environment variable, which a process started from this one inherits. There, `if_asked()` does the same: the entry
point `verl.plugins` calls it in every process that imports verl (`plugin`).

Code that has imported TransferQueue, or verl's own stand-in for a missing one, before that has its names already. Those
of verl's modules are set anew; for others call `install()` first.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from types import ModuleType

log = logging.getLogger(__name__)

VARIABLE = "DATAPLANE_TRANSFER_QUEUE"
"""What is in the environment where this package stands in: "nested" or "dense", as which what was put dense comes."""

_HERE = __package__
_NAME = "transfer_queue"
_SUBMODULES = {
    "client": "client",
    "interface": "kv",
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
}
_BOUND = ("tq", "BatchMeta", "KVBatchMeta")  # what verl's modules take from it at their head


def install(*, dense: bool = False) -> None:
    """Stand in for `transfer_queue` in this process, and in those that it starts and that ask (`if_asked`). Idempotent.

    dense: what was put dense comes back dense. By default it comes back nested, as TransferQueue gives it and as verl's
    trainer takes for granted.
    """
    os.environ[VARIABLE] = "dense" if dense else "nested"
    here = importlib.import_module(str(_HERE))
    sys.modules[_NAME] = here
    for name, own in _SUBMODULES.items():
        sys.modules[f"{_NAME}.{name}"] = importlib.import_module(f"{_HERE}.{own}")
    _rebind(here)


def if_asked() -> bool:
    """Stand in where the environment says so; whether it does."""
    asked = os.environ.get(VARIABLE, "")
    if asked:
        install(dense=asked == "dense")
        log.warning("dataplane stands in for transfer_queue in this process (%s=%s)", VARIABLE, asked)
    return bool(asked)


def dense() -> bool:
    """Whether what was put dense comes back dense where `init` is not told."""
    return os.environ.get(VARIABLE) != "nested"


def _rebind(here: ModuleType) -> None:
    """Give verl's modules that are loaded already these names instead of those that they have."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "verl" and isinstance(module, ModuleType):
            for bound in _BOUND:
                if bound in module.__dict__:
                    setattr(module, bound, here if bound == "tq" else getattr(here, bound))
