"""Standing in for the calls of the module `transfer_queue`, so that code written for it runs unchanged.

`install()` puts this package's calls, client, data sets and errors into the place of TransferQueue's, wherever a module
of this process has them, and sets an environment variable, which a process started from this one inherits. There,
`if_asked()` does the same: the entry point `verl.plugins` calls it in every process that imports verl (`plugin`), and
so does the first import of `transfer_queue` in a worker of a Ray that is initialised afterwards (`workers`).
`uninstall()` puts all of it back. Metadata and samplers are TransferQueue's own classes in both.

Invariants: all modules have the calls of one system, whenever they were imported. Where TransferQueue itself
runs in this process, nothing stands in for it.
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
"""What is in the environment where this package stands in: "nested" or "dense", as which what was put dense comes."""

_HERE = str(__package__)
_NAME = "transfer_queue"

_theirs: dict[str, Any] = {}
"""What ours are in the place of; empty where nothing stands in."""


def install(*, dense: bool = False) -> None:
    """Stand in for `transfer_queue` in this process, and in those that it starts and that ask (`if_asked`). Idempotent.

    dense: what was put dense comes back dense. By default it comes back nested, as TransferQueue gives it and as verl's
    trainer takes for granted. Raises Misuse where TransferQueue itself has been initialised in this process.
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
    """Undo `install`: this process, and those that it starts, have TransferQueue itself again. Idempotent."""
    os.environ.pop(VARIABLE, None)
    importlib.import_module(f"{_HERE}.workers").withdraw()
    _exchange(_ours(), _theirs)
    _theirs.clear()


def if_asked() -> bool:
    """Stand in where the environment says so; whether it does."""
    asked = os.environ.get(VARIABLE, "")
    if asked:
        install(dense=asked == "dense")
        log.warning("dataplane stands in for transfer_queue in this process (%s=%s)", VARIABLE, asked)
    return bool(asked)


def is_in() -> bool:
    """Whether this package's calls are those of the module `transfer_queue` of this process."""
    return bool(_theirs)


def dense() -> bool:
    """Whether what was put dense comes back dense where `init` is not told."""
    return os.environ.get(VARIABLE) != "nested"


def _ours() -> dict[str, Any]:
    """What this package has in the place of theirs."""
    here = importlib.import_module(_HERE)
    return {name: getattr(here, name) for name in _theirs}


def _exchange(have: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Let all modules but this package's have what is wanted in place of what they have under the same name."""
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and not str(names.get("__name__")).startswith(_HERE):  # some are no modules
            names.update({name: wanted[name] for name, held in have.items() if names.get(name) is held})
