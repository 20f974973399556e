"""Lets TransferQueue, and so verl, store its data in the plane, if the configuration has this line:

    transfer_queue.backend.storage_backend=Dataplane

verl imports this module in every process that imports verl (entry points `verl.plugins`), and calls nothing, so the
import registers the backend. Without verl, or with a verl before 0.9:

    import dataplane.integrations.verl.plugin      # in the process that calls transfer_queue.init() first, before that

The module also registers `trainer.data_plane=dataplane` with verl's `neo` branch (`neo_plane`).

Invariant: if the registration fails, the reason is logged visibly, because verl logs errors of plugins at DEBUG only.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from pathlib import Path

from dataplane.errors import Misuse
from dataplane.integrations.transfer_queue import module_patch
from dataplane.integrations.transfer_queue.settings import NAME

log = logging.getLogger(__name__)

_NEO = "trainer/ppo/data_plane.py"


def register() -> bool:
    """Have `transfer_queue.init` look for this package in its configuration, and replace the calls of `transfer_queue`
    now if the environment says so. Returns whether TransferQueue is there. Idempotent."""
    try:
        module_patch.watch()
        module_patch.if_asked()
    except (ImportError, AttributeError, Misuse) as error:
        level = logging.INFO if neo else logging.WARNING  # verl's neo branch has no TransferQueue
        log.log(level, "the TransferQueue backend %s is not there: transfer_queue can not be used: %s", NAME, error)
        return False
    log.info("registered the TransferQueue backend %s: transfer_queue.backend.storage_backend=%s", NAME, NAME)
    return True


def register_neo() -> bool:
    """Register `trainer.data_plane=dataplane` with verl's `neo` branch. Returns whether this verl has data planes."""
    verl = sys.modules.get("verl")
    if verl is None or not any(Path(place, _NEO).is_file() for place in verl.__path__):
        return False
    try:
        planes = import_module("verl.trainer.ppo.data_plane")._DATA_PLANE_CLASSES
        planes.setdefault("dataplane", "dataplane.integrations.verl.neo_plane.DataplanePPODataPlane")
    except (ImportError, AttributeError) as error:
        log.warning(
            "verl does not know trainer.data_plane=dataplane: its data planes are not as in its neo branch: %s", error
        )
        return False
    return True


neo = register_neo()
"""Whether `trainer.data_plane=dataplane` is registered with verl."""

loaded = register()
"""Whether the line of the configuration has an effect in this process."""
