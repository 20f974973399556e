"""Shards whose bytes a client keeps in memory of its own, on a device or the host.

The node has their layouts and handles. Other processes of the host map the memory of a shard by its handle. A process
pins the number of the handle, as it pins a shard, while it maps the memory. For processes that cannot map it, and for
readers on another host or in a stream, the client copies the bytes to the arena (`land`). Then the shard is an ordinary
one.

Invariants: the client is asked once to drop the memory, after the shard has landed or was freed, and after the last
process has unmapped it. A shard that has not landed when its client goes is lost (OwnerDied).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterable

from dataplane.errors import DataplaneError, OwnerDied
from dataplane.store.pins import Pins
from dataplane.store.shard import Shard
from dataplane.store.shards import Shards


class ClientShard:
    """Takes the place of a shard's file: its bytes are in memory of a client (`store.shard.Backing`)."""

    def __init__(self, client: Hashable, handle: bytes, number: int, ask: Callable[[bool], None]) -> None:
        """`handle`: maps the memory in another process. `number`: the number under which the handle is pinned.
        `ask(land)` asks the client to copy the bytes to the arena if `land`, else to drop the memory."""
        self.client = client
        self.handle = handle
        self.number = number
        self.over = False
        self.gone = False
        self._ask = ask
        self._landing: asyncio.Future[None] | None = None

    async def read(self, memory: memoryview) -> None:
        """Raises OwnerDied: the node itself has no access to the bytes."""
        raise self.lost()

    async def land(self) -> None:
        """Ask the client to copy the bytes to the arena, and wait until it has. Raises OwnerDied if the client goes
        meanwhile, or the error that the client reports."""
        if self._landing is None:
            self._landing = asyncio.get_running_loop().create_future()
            self._ask(True)
        await asyncio.shield(self._landing)

    def landed(self, error: DataplaneError | None = None) -> None:
        """End the waits of `land`: the client has copied the bytes, or has failed with this error. After an error, the
        next `land` asks the client again."""
        landing, self._landing = self._landing, None
        if landing is not None and not landing.done():
            if error is None:
                landing.set_result(None)
            else:
                landing.set_exception(error)
                landing.exception()  # mark the error as retrieved, even if no reader waits any more

    def drop(self) -> None:
        """Tell the client that it may reuse its memory."""
        if not self.gone:
            self._ask(False)

    def lost(self) -> OwnerDied:
        """The error of a read after the client has gone."""
        return OwnerDied(f"{self.client}, which kept the bytes in memory of its own, has gone: put them again")


class ClientShards:
    """The kept shards of one store, by the numbers of their handles."""

    def __init__(self, shards: Shards, pins: Pins) -> None:
        self._shards = shards
        self._pins = pins
        self._handles: dict[int, ClientShard] = {}

    def __bool__(self) -> bool:
        return bool(self._handles)

    def __contains__(self, number: int) -> bool:
        return number in self._handles

    def add(self, kept: ClientShard) -> None:
        self._handles[kept.number] = kept

    def has_any(self, numbers: Iterable[int]) -> bool:
        """Whether a client keeps the bytes of one of these shards."""
        return bool(self._handles) and any(
            shard is not None and shard.extent is None and isinstance(shard.file, ClientShard)
            for shard in map(self._shards.get, numbers)
        )

    def map(self, client: Hashable, numbers: Iterable[int]) -> list[tuple[Shard, ClientShard]]:
        """Return the shards among these whose bytes a client keeps, and pin their handles for `client`. Raises Freed or
        the `damage` of a shard."""
        shards = list(map(self._shards.find, numbers))
        found = [(s, s.file) for s in shards if s.extent is None and isinstance(s.file, ClientShard)]
        self._pins.add_all(client, [kept.number for _, kept in found])
        return found

    def of(self, client: Hashable, number: int) -> tuple[Shard, ClientShard] | None:
        """The shard with this number if this client keeps its bytes, else None."""
        shard = self._shards.get(number)
        kept = None if shard is None else shard.file
        if shard is None or not isinstance(kept, ClientShard) or kept.client is not client:
            return None
        return shard, kept

    def stays(self, client: Hashable, number: int, error: DataplaneError) -> None:
        """Raise the error in the waiting readers of a kept shard: its client could not copy the bytes."""
        if (found := self.of(client, number)) is not None:
            found[1].landed(error)

    def end(self, kept: ClientShard) -> None:
        """Release the handle of a kept shard, now or with its last pin, and then ask the client to drop the memory."""
        kept.over = True
        if not self._pins.holds(kept.number) and self._handles.pop(kept.number, None) is not None:
            kept.drop()

    def unpinned(self, number: int) -> bool:
        """Note that the handle with this number has lost its last pin. Release it if its shard has landed or was freed.
        Returns whether there is such a handle."""
        kept = self._handles.get(number)
        if kept is not None and kept.over:
            self.end(kept)
        return kept is not None

    def lose(self, client: Hashable) -> None:
        """Mark the shards that this client kept as lost, because its process has ended. Their readers get OwnerDied."""
        lost = [kept for kept in self._handles.values() if kept.client is client]
        if not lost:
            return
        for shard in self._shards.values():
            if isinstance(shard.file, ClientShard) and shard.file.client is client:
                shard.damage = shard.file.lost()
                shard.file.landed(shard.damage)
        for kept in lost:
            kept.over = kept.gone = True
            if not self._pins.holds(kept.number):
                del self._handles[kept.number]
