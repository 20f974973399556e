"""Addresses that another system resolves: `ray` is the node of this host that a Ray job has put there.

The integrations are above this package, and are imported when their address is first used.
"""

from __future__ import annotations

import importlib

from dataplane.config import NodeConfig

_DOORS = {"ray": "dataplane.integrations.ray"}


def is_door(address: str) -> bool:
    """Whether another system says which node this is."""
    return address in _DOORS


def find(address: str, config: NodeConfig | None, dead: str = "") -> str:
    """The address of this host's node, as that system says; not that of one that is `dead`, whatever it says. Blocks.
    Raises as the integration does."""
    found: str = importlib.import_module(_DOORS[address]).find(config, dead)
    return found
