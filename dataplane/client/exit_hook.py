"""Planes that keep columns in memory of this process, closed when it ends without an error of its own doing: so what
they keep is brought to the arena.

That takes threads, which the interpreter ends before it calls what `atexit` knows. So it is done where the pools of
`concurrent.futures` end theirs, and before those: what is registered last is called first.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Protocol

from dataplane.errors import DataplaneError

log = logging.getLogger(__name__)


class Closes(Protocol):
    """A plane."""

    def close(self) -> None:
        """Close it; nothing in a forked child, or when it is closed already."""


_keeping: weakref.WeakSet[Closes] = weakref.WeakSet()
_registered = threading.Lock()  # owned by the first to register


def close_at_end(plane: Closes) -> None:
    """Have it closed when the process ends, unless it is before."""
    _keeping.add(plane)
    if _registered.acquire(blocking=False):
        threading._register_atexit(_close_all)  # type: ignore[attr-defined]  # as concurrent.futures does


def _close_all() -> None:
    for plane in list(_keeping):
        try:
            plane.close()
        except DataplaneError as error:
            log.warning("what a plane keeps is lost, since it could not be closed: %s", error)
