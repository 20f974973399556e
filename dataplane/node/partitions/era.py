"""The era of a coordinator: a random value at the coordinator, of which each data directory has a copy.

A coordinator that has lost its values has no partitions. A node that relied on this would free everything in its
directory. Therefore the first node that finds no era creates one, and every node with a data directory writes the era
into that directory. If the values are lost while nodes run, the nodes write the partitions that they lead to the
coordinator again, and the new era into their directories. A node that is started with a directory of another era
refuses to run, and leaves the directory unchanged.
"""

from __future__ import annotations

import asyncio
import logging
import secrets

from dataplane.coordinator.base import Coordinator, OutcomeUnknown, Unavailable
from dataplane.errors import DirectoryUnusable
from dataplane.store.durable.database import Notes

log = logging.getLogger(__name__)

KEY = "era"
"""The key of the era at the coordinator."""

_AGAIN_S = 0.5


async def current(coordinator: Coordinator) -> bytes:
    """Return the era of the coordinator; create one if there is none. Raises Unavailable, OutcomeUnknown."""
    found = await coordinator.read(KEY)
    if found is None:
        made = secrets.token_bytes(8)
        found = await coordinator.swap(KEY, None, made) or made
    return found


class Era:
    """The era in one data directory, which `run` keeps equal to that of the coordinator."""

    def __init__(self, coordinator: Coordinator, notes: Notes, path: str) -> None:
        """`path`: the directory, for messages of errors. Raises Corrupt if the era on disk is damaged."""
        self._coordinator = coordinator
        self._notes = notes
        self._path = path
        self._noted = notes.load().get(KEY, b"")
        self.known = asyncio.Event()
        """Set once the era of the coordinator is known to be that of the directory."""

    async def run(self) -> None:
        """Compare the era of the coordinator with that of the directory. Then write each new era of the coordinator
        into the directory, until cancelled. Raises DirectoryUnusable if the two differ at the start."""
        while True:
            try:
                async for value in self._coordinator.watch(KEY):
                    await self._saw(value or b"")
            except (Unavailable, OutcomeUnknown) as error:
                log.debug("reading the era from the coordinator failed: %s", error)
            await asyncio.sleep(_AGAIN_S)

    async def _saw(self, era: bytes) -> None:
        if not era and (self.known.is_set() or not self._noted):
            era = await current(self._coordinator)
        if not self.known.is_set() and self._noted not in (b"", era):
            raise DirectoryUnusable(
                f"{self._path} goes with values that this coordinator does not have: it has lost them, or is another."
                " Restore etcd's data, or give the node another --data-dir",
                path=self._path,
                reason="another cluster's",
            )
        if era != self._noted:
            await self._notes.write({KEY: era})
            self._noted = era
        self.known.set()
