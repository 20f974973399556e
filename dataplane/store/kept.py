"""Shards whose bytes a client keeps in memory of its own: a device's, or its process's.

The node has their layout and a handle, by which other processes of the host map that memory. Who does holds the
handle's own number, as shards are held. Whoever can not map it, and whoever reads for another host or for a stream,
has the client bring the bytes to the arena (`land`): then the shard is one like any other.

What always holds: the client is told to drop the memory once, when the shard has landed or nobody owns it any more, and
nobody maps it; a shard that has not landed when its client goes is lost, and says so (OwnerDied).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

from dataplane.errors import DataplaneError, OwnerDied


class Kept:
    """In the place of the file that a shard may have (`store.backing`)."""

    def __init__(self, client: Hashable, handle: bytes, number: int, ask: Callable[[bool], None]) -> None:
        """`number`: under which the handle is held; `ask(land)`: tell the client to bring the bytes to the arena, or to
        drop the memory."""
        self.client = client
        self.handle = handle
        self.number = number
        self.over = False
        self.gone = False
        self._ask = ask
        self._landing: asyncio.Future[None] | None = None

    async def read(self, memory: memoryview) -> None:
        """The node itself has no way to the bytes."""
        raise self.lost()

    async def land(self) -> None:
        """Have the client bring the bytes, and wait until it has. Raises OwnerDied, and what the client could not."""
        if self._landing is None:
            self._landing = asyncio.get_running_loop().create_future()
            self._ask(True)
        await asyncio.shield(self._landing)

    def landed(self, error: DataplaneError | None = None) -> None:
        """The bytes are in the arena, or will not be; after an error it may be tried again."""
        landing, self._landing = self._landing, None
        if landing is not None and not landing.done():
            if error is None:
                landing.set_result(None)
            else:
                landing.set_exception(error)
                landing.exception()  # seen, also where nobody waits any more

    def drop(self) -> None:
        """The client may use its memory for something else; one that has gone is told nothing."""
        if not self.gone:
            self._ask(False)

    def lost(self) -> OwnerDied:
        """What is raised for it once the client has gone."""
        return OwnerDied(f"{self.client}, which kept the bytes in memory of its own, has gone: put them again")
