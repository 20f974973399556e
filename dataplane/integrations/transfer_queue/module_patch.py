"""Replaces the calls of the module `transfer_queue`, so that code written for it runs unchanged.

`install()` replaces TransferQueue's calls, client, data sets and errors by those of this package in all modules of this
process, and sets an environment variable that child processes inherit. There, `if_asked()` does the same: the entry
point `verl.plugins` calls it in every process that imports verl (`plugin`), and so does the first import of
`transfer_queue` in a worker of a Ray that is initialised afterwards (`workers`). `uninstall()` reverts all of it.
Metadata and samplers are TransferQueue's own classes in both cases.

Invariants: all modules have the calls of one system, whenever they were imported. If TransferQueue itself runs in
this process, nothing is replaced.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from dataplane.errors import Misuse

log = logging.getLogger(__name__)

VARIABLE = "DATAPLANE_TRANSFER_QUEUE"
"""The environment variable of the replacement: "nested" or "dense", the form of tensors that were put dense."""

_HERE = str(__package__)
_NAME = "transfer_queue"

_theirs: dict[str, Any] = {}
"""The replaced originals; empty if nothing is replaced."""


def install(*, dense: bool = False) -> None:
    """Replace the calls of `transfer_queue` in this process, and in processes started from it that ask (`if_asked`).
    Idempotent.

    dense: tensors that were put dense are returned dense. By default they are returned nested, as by TransferQueue,
    which verl's trainer relies on. Raises Misuse if TransferQueue itself has been initialised in this process.
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
    os.environ[VARIABLE] = "dense" if dense else "nested"
    importlib.import_module(f"{_HERE}.workers").arrange()
    if not is_in():
        here = importlib.import_module(_HERE)
        both = {name: getattr(theirs, name, getattr(theirs.client, name, None)) for name in here.__all__}
        _theirs.update({name: each for name, each in both.items() if each not in (None, getattr(here, name))})
        _exchange(_theirs, _ours())


def uninstall() -> None:
    """Undo `install`: this process, and those that it starts, use TransferQueue itself again. Idempotent."""
    os.environ.pop(VARIABLE, None)
    importlib.import_module(f"{_HERE}.workers").withdraw()
    _exchange(_ours(), _theirs)
    _theirs.clear()


def if_asked() -> bool:
    """Replace the calls if the environment says so. Returns whether it does."""
    asked = os.environ.get(VARIABLE, "")
    if asked:
        install(dense=asked == "dense")
        log.warning("dataplane stands in for transfer_queue in this process (%s=%s)", VARIABLE, asked)
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


def _exchange(have: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """In all modules but those of this package, replace the objects of `have` by those of `wanted` with the same
    names."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and not str(names.get("__name__")).startswith(_HERE):  # some are no modules
            names.update({name: wanted[name] for name, held in have.items() if names.get(name) is held})
