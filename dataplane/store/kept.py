"""Shards whose bytes a client keeps in memory of its own: a device's, or its process's.

The node has their layout and a handle, by which other processes of the host map that memory. Who does holds the
handle's own number, as shards are held. Whoever can not map it, and whoever reads for another host or for a stream,
has the client bring the bytes to the arena (`land`): then the shard is one like any other.

Invariants: the client is told to drop the memory once, when the shard has landed or nobody owns it any more, and
nobody maps it; a shard that has not landed when its client goes is lost, and says so (OwnerDied).

A reader on another host may be given an offer (`offer`), by which it reads from the client itself. It holds nothing:
where the memory goes meanwhile, the read ends, and the reader asks as others do.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Hashable
from contextlib import suppress

from dataplane.errors import DataplaneError, OwnerDied

OfferTo = tuple[int, str, str, str, float]
"""See `wire.messages`."""
Ask = Callable[[bool, OfferTo | None], None]
_readers = itertools.count(1)
_OFFER_S = 4.0  # for a client to make an offer


class Kept:
    """In the place of the file that a shard may have (`store.backing`)."""

    def __init__(self, client: Hashable, handle: bytes, number: int, ask: Ask) -> None:
        """`number`: under which the handle is held; `ask(land, offer)`: tell the client to bring the bytes to the
        arena, or to offer them, or to drop the memory."""
        self.client = client
        self.handle = handle
        self.number = number
        self.over = False
        self.gone = False
        self._ask = ask
        self._landing: asyncio.Future[None] | None = None
        self._offers: dict[int, asyncio.Future[tuple[str, bytes]]] = {}

    async def read(self, memory: memoryview) -> None:
        """The node itself has no way to the bytes."""
        raise self.lost()

    async def land(self) -> None:
        """Have the client bring the bytes, and wait until it has. Raises OwnerDied, and what the client could not."""
        if self._landing is None:
            self._landing = asyncio.get_running_loop().create_future()
            self._ask(True, None)
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

    async def offer(self, kind: str, host: str, told: str, seconds: float) -> tuple[str, bytes] | None:
        """Have the client, if its memory is of this kind, listen at this host, found at `told`, and let one reader read
        the bytes within so many seconds: its address and ticket; None where it can not, or does not in time."""
        reader = next(_readers)
        found = self._offers[reader] = asyncio.get_running_loop().create_future()
        self._ask(False, (reader, kind, host, told, seconds))
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(seconds / 2, _OFFER_S)):
                    address, ticket = await found
                    return (address, ticket) if address else None
            return None
        finally:
            del self._offers[reader]

    def offered(self, reader: int, address: str, ticket: bytes) -> None:
        """The client says where."""
        found = self._offers.get(reader)
        if found is not None and not found.done():
            found.set_result((address, ticket))

    def lose(self) -> None:
        """The client has gone."""
        self.landed(self.lost())
        for reader in self._offers:
            self.offered(reader, "", b"")

    def drop(self) -> None:
        """The client may use its memory for something else; one that has gone is told nothing."""
        if not self.gone:
            self._ask(False, None)

    def lost(self) -> OwnerDied:
        """What is raised for it once the client has gone."""
        return OwnerDied(f"{self.client}, which kept the bytes in memory of its own, has gone: put them again")
