"""References whose last user in this process has gone, and who frees them.

What lies in a column is freed once the tensors that it was put for, or the handles that own it, are gone here. That is
told by their finalizers, which run wherever Python likes, also in the middle of a call to the plane: so they only note
the reference, and the next call that puts or sends something frees what was noted (`now`).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from dataplane.batch.ref import BatchRef
from dataplane.client.sync import Plane
from dataplane.errors import Lost

_noted: deque[BatchRef] = deque()


class Held:
    """What is freed once all of `users` are gone."""

    def __init__(self, ref: BatchRef, users: Iterable[Any]) -> None:
        self._ref = ref
        self._left = 1
        for user in users:
            self._left += 1
            weakref.finalize(user, self._gone).atexit = False
        self._gone()

    def _gone(self) -> None:
        self._left -= 1
        if not self._left:
            later(self._ref)


def later(ref: BatchRef) -> None:
    """Have it freed by the next `now`. May be called anywhere."""
    _noted.append(ref)


def now(plane: Plane) -> None:
    """Free what was noted. Raises PeerUnavailable where the node has gone; what was noted is forgotten then."""
    while True:
        try:
            ref = _noted.popleft()
        except IndexError:
            return
        with suppress(Lost):  # its node has died: so has it
            plane.free(ref)
