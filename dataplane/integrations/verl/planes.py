"""Work with this process's plane, whichever it is by now: a node that ended is replaced by another."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from dataplane.client.sync import Plane
from dataplane.errors import Closed, PeerUnavailable
from dataplane.integrations import process

T = TypeVar("T")


def with_plane(work: Callable[[Plane], T]) -> T:
    """What work with this process's plane gives; done again where its node has ended and another runs."""
    plane = process.plane()
    try:
        return work(plane)
    except (PeerUnavailable, Closed):
        again = process.plane()
        if again is plane:
            raise
        return work(again)
