"""The plane of this process, which all doors of a process share.

What always holds: a process has one, connected when it is first needed; a forked child connects itself, and so does a
process whose node has ended, to the one that runs then; nobody who uses it closes it, it closes as the process ends.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress

from dataplane.client.sync import Plane, connect
from dataplane.config import NodeConfig, environment
from dataplane.errors import DataplaneError, Misuse

_NO_NODE = (
    "no node is known to this process: call dataplane.integrations.ray.up() in the driver of a Ray job, or start one"
    " (`dataplane node`) and put its address into DATAPLANE_ADDRESS"
)

_lock = threading.Lock()
_plane: Plane | None = None
_pid = 0


def plane() -> Plane:
    """The plane of this process: of the node that `$DATAPLANE_ADDRESS` names, or else that of the Ray job.

    Raises Misuse where there is neither, PeerUnavailable where the node does not answer.
    """
    return _connected(start=False, config=None)


def start(config: NodeConfig | None = None) -> Plane:
    """As `plane`; where no node is known, one is started for this process and its children, with these settings.

    Raises as `plane`, and Rejected where the settings can not be met.
    """
    return _connected(start=True, config=config)


def close() -> None:
    """Let it go; the next use connects again. Idempotent."""
    global _plane
    with _lock:
        plane, _plane = _plane, None
        if plane is not None and _pid == os.getpid():
            plane.close()


def _connected(*, start: bool, config: NodeConfig | None) -> Plane:
    global _plane, _pid
    with _lock:
        if _plane is not None and _pid == os.getpid() and _ended(_plane):
            dead, _plane = _plane, None
            with suppress(DataplaneError):
                dead.close()
        if _plane is None or _pid != os.getpid():
            _plane, _pid = connect(_address(start=start), config=config), os.getpid()
        return _plane


def _ended(plane: Plane) -> bool:
    """Whether its node has, as far as a call has met with it."""
    try:
        plane._plane.check()  # what every call of its begins with
    except DataplaneError:
        return True
    return False


def _address(*, start: bool) -> str | None:
    known = environment().address
    if known is not None:
        return known
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return "ray"
    if start:
        return None
    raise Misuse(_NO_NODE)


def _end() -> None:
    with suppress(DataplaneError):
        close()


atexit.register(_end)
