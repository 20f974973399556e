"""Shards whose bytes a client keeps in memory of its own: a device's, or its process's.

The node has their layout and a handle, by which other processes of the host map that memory. A mapping process pins the
number of the handle, like a shard. For a process that cannot map it, and for readers on another host or in a stream,
the client copies the bytes to the arena (`land`): then the shard is an ordinary one.

Invariants: the client is told once to drop the memory, when the shard has landed or has no owner any more, and nobody
maps it; a shard that has not landed when its client goes is lost (OwnerDied).

A reader on another host may get an offer (`offer`), by which it reads from the client itself. An offer holds
nothing: if the memory is dropped meanwhile, the read fails, and the reader uses the other path.
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


class ClientShard:
    """Takes the place of the file of a shard (`store.backing`)."""

    def __init__(self, client: Hashable, handle: bytes, number: int, ask: Ask) -> None:
        """`number`: under which the handle is pinned; `ask(land, offer)`: tell the client to copy the bytes to the
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
        """Not possible: the node itself has no access to the bytes."""
        raise self.lost()

    async def land(self) -> None:
        """Have the client copy the bytes, and wait for that. Raises OwnerDied, and the error of the client."""
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
        """Have the client, if its memory is of this kind, listen on this host, with the public address `told`, and
        let one reader read the bytes within this many seconds. Returns its address and ticket; None if it cannot, or
        does not in time."""
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
        """The answer of the client to an offer."""
        found = self._offers.get(reader)
        if found is not None and not found.done():
            found.set_result((address, ticket))

    def lose(self) -> None:
        """The client has gone."""
        self.landed(self.lost())
        for reader in self._offers:
            self.offered(reader, "", b"")

    def drop(self) -> None:
        """Tell the client that it may reuse its memory."""
        if not self.gone:
            self._ask(False, None)

    def lost(self) -> OwnerDied:
        """The error for it after the client has gone."""
        return OwnerDied(f"{self.client}, which kept the bytes in memory of its own, has gone: put them again")
