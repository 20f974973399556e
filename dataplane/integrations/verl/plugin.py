"""What makes this a storage backend of TransferQueue, and so of verl: the line in a configuration is

    transfer_queue.backend.storage_backend=Dataplane

verl imports this module in every process that imports verl (the entry points `verl.plugins`), and calls nothing: so
importing it registers, which no other module of this package does. Without verl:

    import dataplane.integrations.verl.plugin      # in each process, before transfer_queue.init()

What always holds: that it registered is logged, and why it did not too: verl logs what a plugin raises at DEBUG alone.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dataplane.config import environment
from dataplane.integrations.transfer_queue.standing import VARIABLE
from dataplane.integrations.verl.settings import NAME, Settings

log = logging.getLogger(__name__)


def register() -> bool:
    """Make TransferQueue know the backend; whether it does now. Idempotent."""
    if VARIABLE in os.environ:
        log.info("the TransferQueue backend %s is not needed: dataplane stands in for transfer_queue itself", NAME)
        return False
    try:
        from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
        from transfer_queue.storage.managers.base import StorageManagerFactory
    except ImportError as error:
        log.warning("the TransferQueue backend %s is not there: transfer_queue can not be imported: %s", NAME, error)
        return False
    try:
        from dataplane.integrations.verl.storage import DataplaneStorageManager

        StorageManagerFactory.register(NAME)(DataplaneStorageManager)
        StorageBootstrapProvider.register_provider(NAME)(start)
    except (ImportError, AttributeError, TypeError) as error:  # another TransferQueue than those that this was made for
        there = _version("TransferQueue")
        log.warning(
            "the TransferQueue backend %s is not there: TransferQueue %s has another face: %s", NAME, there, error
        )
        return False
    log.info("the TransferQueue backend %s is there: transfer_queue.backend.storage_backend=%s", NAME, NAME)
    return True


def start(conf: Any) -> dict[str, Any]:
    """Put a node on each Ray node; TransferQueue calls it once, in the process that initialises the first.

    conf: TransferQueue's whole configuration. Raises Misuse for a setting that is none, Rejected where a host can not
    meet the settings, PeerUnavailable where a node does not run in time.
    """
    from omegaconf import OmegaConf, open_dict

    given = conf.backend.get(NAME)
    if given is None:
        given = {}
        with open_dict(conf.backend):
            conf.backend[NAME] = given
    settings = Settings.of(OmegaConf.to_container(given, resolve=True) if OmegaConf.is_config(given) else given)
    config = settings.config()
    known = environment().address
    if known is not None:
        log.info("the TransferQueue backend %s uses the node at %s, which has its own settings", NAME, known)
        return {"address": known}
    from dataplane.integrations import ray as door

    door.up(config, transports=settings.transports, key=settings.key)
    return {"address": "ray"}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of no known version"


loaded = register()
"""Whether TransferQueue knows the backend."""
