"""Registers the storage backend with TransferQueue, and so with verl. The line of the configuration is

    transfer_queue.backend.storage_backend=Dataplane

verl imports this module in every process that imports verl (entry points `verl.plugins`), and calls nothing, so the
import registers the backend; no other module of this package does. Without verl, or with a verl before 0.9:

    import dataplane.integrations.verl.plugin      # in each process, before transfer_queue.init()

The module also registers `trainer.data_plane=dataplane` with verl's `neo` branch (`neo_plane`).

Invariants: the name of the backend is registered whenever that is possible, so that a job whose TransferQueue does
not work with the backend is refused at its start, with the versions and the reason, or uses TransferQueue's own
storage if `fallback` says so. The use of the backend is logged visibly, and so is the reason why it cannot be used,
because verl logs errors of plugins at DEBUG only.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from dataplane.config import environment
from dataplane.errors import Rejected
from dataplane.integrations import pickles, process
from dataplane.integrations.transfer_queue.module_patch import VARIABLE
from dataplane.integrations.verl import hooks
from dataplane.integrations.verl.settings import NAME, StorageSettings

log = logging.getLogger(__name__)

_NEO = "trainer/ppo/data_plane.py"
OWN = "SimpleStorage"
"""TransferQueue's own storage."""


def register() -> bool:
    """Register the backend with TransferQueue. Returns whether it works with this TransferQueue. Idempotent."""
    global _why
    if VARIABLE in os.environ:
        log.info("the TransferQueue backend %s is not registered: dataplane replaces transfer_queue itself", NAME)
        return False
    try:
        found = hooks.differences()
    except ImportError as error:
        level = logging.INFO if neo else logging.WARNING  # verl's neo branch has no TransferQueue
        log.log(level, "the TransferQueue backend %s is not there: transfer_queue can not be imported: %s", NAME, error)
        return False
    _why = "; ".join(found)
    try:
        from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
        from transfer_queue.storage.managers.base import StorageManager, StorageManagerFactory

        StorageBootstrapProvider.register_provider(NAME)(start)
        StorageManagerFactory.register(NAME)(_refusing(StorageManager) if _why else _manager())
    except (ImportError, AttributeError, TypeError) as error:
        _why = _why or str(error)
    if _why:
        log.warning("the TransferQueue backend %s is not available: %s", NAME, _refusal())
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


def start(conf: Any) -> dict[str, Any]:
    """Start a node on each Ray node. TransferQueue calls this once, in the process that initialises first.

    conf: TransferQueue's whole configuration. Raises Misuse for an unknown setting; Rejected if a host cannot meet
    the settings or the backend does not work with this TransferQueue; PeerUnavailable if a node does not start in
    time or the one of $DATAPLANE_ADDRESS does not answer; Unauthenticated if that belongs to another user.
    TransferQueue has created its controller by then. The controller ends with the error, because the next `init()`
    would otherwise wait for its configuration for ever.
    """
    try:
        return _start(conf)
    except BaseException:
        from transfer_queue import interface

        interface.close()
        raise


def _start(conf: Any) -> dict[str, Any]:
    from omegaconf import OmegaConf, open_dict

    given = conf.backend.get(NAME)
    if given is None:
        given = {}
        with open_dict(conf.backend):
            conf.backend[NAME] = given
    settings = StorageSettings.of(OmegaConf.to_container(given, resolve=True) if OmegaConf.is_config(given) else given)
    config = settings.config()
    if _why:
        if settings.fallback:
            return _fall_back(conf)
        raise Rejected(_refusal())
    pickles.install_for_verl()
    known = environment().address
    if known is not None:
        process.plane()  # which is there, and takes this user, or says why not
        _say(f"TransferQueue stores in the plane ({NAME}): by the node at {known}, which has its own settings")
        return {"address": known}
    from dataplane.integrations import ray as nodes

    nodes.up(config, transports=settings.transports, key=settings.key, keep=False)
    _say(f"TransferQueue stores in the plane ({NAME}): by a node on each Ray node")
    return {"address": "ray"}


def _manager() -> Any:
    from dataplane.integrations.verl.storage import DataplaneStorageManager

    hooks.attach()
    hooks.attach_checks()
    return DataplaneStorageManager


def _refusing(base: Any) -> Any:
    """A storage manager that cannot be created, for a process whose TransferQueue differs from the driver's."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise Rejected(_refusal())

    return type("DataplaneStorageManager", (base,), {"__new__": refuse})


def _refusal() -> str:
    return (
        f"{hooks.versions()} do not go together: {_why}. Install a TransferQueue that this dataplane was tested with"
        f" (docs/verl.md says which), or set transfer_queue.backend.storage_backend={OWN}, or"
        f" +transfer_queue.backend.{NAME}.fallback=true for that wherever it is needed"
    )


def _fall_back(conf: Any) -> dict[str, Any]:
    """Let TransferQueue use its own storage."""
    from omegaconf import open_dict
    from transfer_queue import interface
    from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider

    log.warning("TransferQueue stores in its own %s: %s", OWN, _refusal())
    with open_dict(conf.backend):
        conf.backend.storage_backend = OWN
    made: dict[str, Any] = StorageBootstrapProvider.get_provider(OWN)(conf)
    interface._TQ_STORAGE[OWN] = made  # under this name TransferQueue ends it
    return {}


def _say(what: str) -> None:
    """Log a line at the level that frameworks show, which is WARNING."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s", what)
    else:
        sys.stderr.write(f"dataplane: {what}\n")


_why = ""
"""Why the backend does not work with this TransferQueue; empty if it does."""

neo = register_neo()
"""Whether `trainer.data_plane=dataplane` is registered with verl."""

loaded = register()
"""Whether the backend is registered with TransferQueue."""
