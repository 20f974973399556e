"""Memory reserved for clients to write, until it is sealed as a shard, given back, or revoked.

Invariant: a reservation belongs to one client. Its bytes are given back when it is aborted, when its client ends, or
when its client sends nothing for the lease. A silent client may still write, so its addresses are not reused until it
ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dataplane.batch.layout import aligned
from dataplane.batch.layout_check import CheckedLayout, check_layout
from dataplane.clock import Clock, Deadline
from dataplane.errors import Backpressure, Corrupt, LeaseExpired, ProtocolMismatch
from dataplane.store.arena import Arena, Extent, pages
from dataplane.store.budget import Budget, Purpose
from dataplane.store.shard import Shard, check_cost
from dataplane.store.stored import Rooms


@dataclass(frozen=True, slots=True)
class Reservation:
    """Memory that one client may write, and the number of the future shard."""

    shard: int
    extent: Extent


class Reservations:
    """The reservations of one store. `rooms`: has the sizes of all shards and reservations. `numbers`: the numbers of
    the next shards. `lease_s`: seconds without a message after which a client loses its reservations."""

    def __init__(
        self, budget: Budget, arena: Arena, rooms: Rooms, numbers: Iterator[int], lease_s: float, clock: Clock
    ) -> None:
        self._budget = budget
        self._arena = arena
        self._rooms = rooms
        self._numbers = numbers
        self.lease_s = lease_s
        self._clock = clock
        self._reserved: defaultdict[Hashable, dict[int, Extent]] = defaultdict(dict)
        self._revoked: defaultdict[Hashable, dict[int, Extent]] = defaultdict(dict)
        self._seen: dict[Hashable, float] = {}

    def reserve_now(self, client: Hashable, sizes: Sequence[int], purpose: Purpose = "put") -> list[Reservation] | None:
        """Reserve memory as `reserve` does, with its errors. Returns None if the request would have to wait."""
        total = self._total(sizes)
        if not self._budget.try_reserve(total, purpose, pages(max(sizes))):
            return None
        return self._allocate(client, sizes, client)

    async def reserve(
        self, client: Hashable, sizes: Sequence[int], deadline: Deadline, purpose: Purpose = "put"
    ) -> list[Reservation]:
        """Reserve memory for shards of these sizes in bytes, all or none, for the client to write and then seal.

        Raises ProtocolMismatch for no or negative sizes, LimitExceeded if together they exceed the budget, Backpressure
        at the deadline or if the system refuses a segment.
        """
        await self._budget.reserve(self._total(sizes), deadline, purpose, pages(max(sizes, default=0)))
        return self._allocate(client, sizes, client)

    def _total(self, sizes: Sequence[int]) -> int:
        if not sizes or min(sizes) < 0:
            raise ProtocolMismatch(f"a reservation is of one or more sizes, none negative, not {list(sizes)[:8]}")
        return sum(map(pages, sizes))

    def _allocate(self, client: Hashable, sizes: Sequence[int], owner: Hashable) -> list[Reservation]:
        """Allocate extents for memory that the budget has granted. Raises Backpressure if the system refuses a segment;
        then the bytes are given back."""
        self.touch(client)
        made: list[Reservation] = []
        following = self._total(sizes)
        try:
            for size in sizes:
                following -= pages(size)
                made.append(Reservation(next(self._numbers), self._arena.allocate(owner, size, following)))
        except OSError as error:
            for reservation in made:
                self._arena.release(reservation.extent)
            total = self._total(sizes)
            self._budget.release(total)
            raise Backpressure(f"the node can not make a segment: {error.strerror}", needed=total) from None
        for reservation in made:
            self._rooms.add(reservation.extent.size)
        self._reserved[client].update((r.shard, r.extent) for r in made)
        return made

    def sealed(self, client: Hashable, number: int, encoded: bytes, scope: str, holder: str) -> Shard:
        """Make a shard with this encoded layout of a reservation, which exists until `taken` is called. Raises
        LeaseExpired if it was revoked, ProtocolMismatch if it is not the client's, Corrupt or LimitExceeded for an
        invalid layout."""
        if number in self._revoked[client]:
            raise LeaseExpired(
                f"no heartbeat for {self.lease_s} s, so the node took the memory back; put again",
                lease_s=self.lease_s,
            )
        extent = self._reserved[client].get(number)
        if extent is None:
            raise ProtocolMismatch(f"shard {number} is no reservation of this client")
        layout = laid_out(encoded, extent.size)
        with self._arena.view(extent) as view:
            layout.check_contents(np.frombuffer(view, dtype=np.uint8))
        columns = len(layout.outline.columns)
        return Shard(number, extent.size, layout.rows, columns, encoded, holder, scope, 0, extent)

    def taken(self, client: Hashable, number: int) -> None:
        """Forget a reservation that has become a shard."""
        self._rooms.remove(self._reserved[client].pop(number).size)

    def abort(self, client: Hashable, numbers: Iterable[int]) -> None:
        """Give reservations back unsealed. Numbers that are no reservations of the client are ignored."""
        for number in numbers:
            extent = self._reserved[client].pop(number, None)
            if extent is not None:
                self._release(extent)
            revoked = self._revoked[client].pop(number, None)
            if revoked is not None:
                self._arena.readmit(revoked)

    def _release(self, extent: Extent) -> None:
        self._arena.release(extent)
        self._rooms.remove(extent.size)
        self._budget.release(extent.size)

    def touch(self, client: Hashable) -> None:
        """Record that the client has sent a message."""
        self._seen[client] = self._clock()

    def silent(self, client: Hashable) -> bool:
        """Whether the client has sent nothing for `lease_s`."""
        limit = self._clock() - self.lease_s
        return self._seen.get(client, limit) < limit

    def revoke_silent(self) -> list[Hashable]:
        """Revoke the reservations of silent clients. Returns the clients."""
        silent = [client for client, held in self._reserved.items() if held and self.silent(client)]
        for client in silent:
            self.revoke(client)
        return silent

    def revoke(self, client: Hashable) -> None:
        """Return the memory of the client's reservations. The client may still write there, so their addresses are not
        reused until it aborts them or ends."""
        for number, extent in self._reserved.pop(client, {}).items():
            self._arena.punch(extent, 0, extent.size, extent.size)
            self._revoked[client][number] = extent
            self._rooms.remove(extent.size)
            self._budget.release(extent.size)

    def leave(self, client: Hashable) -> None:
        """Give back the reservations of a client that has gone."""
        self.abort(client, [*self._reserved[client], *self._revoked[client]])
        del self._reserved[client], self._revoked[client]
        self._seen.pop(client, None)

    def __iter__(self) -> Iterator[tuple[Hashable, int]]:
        """Iterate over (client, reserved bytes)."""
        return ((client, sum(e.size for e in held.values())) for client, held in self._reserved.items())


def laid_out(encoded: bytes, size: int) -> CheckedLayout:
    """Decode and check the layout of a shard of this size in bytes. Raises Corrupt or LimitExceeded."""
    try:
        layout = check_layout(encoded, size)
    except ProtocolMismatch as error:  # only this request fails, not the connection: its message is well formed
        raise Corrupt(str(error)) from None
    check_cost(layout, encoded, size)
    return layout


def rounded(nbytes: int) -> int:
    """The size of a shard whose bytes, so many, came in a message: a positive multiple of 64."""
    return max(aligned(nbytes), aligned(1))


def inline(payload: bytes, encoded: bytes, scope: str, holder: str) -> Shard:
    """Make a shard of these bytes, without a number or a location. Raises Corrupt or LimitExceeded if the layout is
    invalid or does not match the bytes."""
    size = rounded(len(payload))
    layout = laid_out(encoded, size)
    layout.check_contents(np.frombuffer(payload.ljust(size, b"\0"), np.uint8))
    columns = len(layout.outline.columns)
    return Shard(0, size, layout.rows, columns, encoded, holder, scope, 0)
