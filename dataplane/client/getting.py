"""Reading what references mean: shards pinned, mapped, and put together as columns.

What always holds: a get that fails or is cancelled holds nothing; what it gave stays valid as long as a view of it
lives, also when the plane is closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dataplane.batch.alike import Laid, laid, one
from dataplane.batch.batch import Batch
from dataplane.batch.ref import BatchRef, ShardKey
from dataplane.batch.rows import Rows
from dataplane.client import keeping
from dataplane.client.connection import Connection
from dataplane.client.memory import Bytes, HeldShard
from dataplane.client.opening import Held, Opening
from dataplane.client.pins import Pin
from dataplane.errors import Freed
from dataplane.wire import messages as m

_TOGETHER = 256 << 10
"""Bytes of small shards that share a pin, as the columns of one put share a shard: to drop a pin is a message, and
a few hundred of those take longer than reading what they held."""


class Getter:
    """Reads over one connection. To be used from its loop alone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def get(self, ref: BatchRef, timeout: float) -> Batch:
        """The rows and columns that the reference means. Raises as `AsyncPlane.get`."""
        ref = ref.unlinked()
        mine, others = self._parted(ref)
        held: dict[ShardKey, Held] = {}
        if mine or others:
            own = [shard for _, shard in mine]
            request = m.Pin(self._connection.next_id(), own, timeout, _wanted(ref, others), True, True)
            reply = await self._connection.request(request, m.Held, timeout)
            if reply.kept:
                try:
                    mapped, again = self._mapped(ref, reply)
                except BaseException:
                    self._connection.tell(m.Unpin([number for number, *_ in reply.shards]))
                    raise
                held |= mapped
                mine = [key for key in mine if key not in mapped]
                if again:
                    self._connection.tell(m.Unpin([number for number, *_ in reply.shards]))
                    own = [shard for _, shard in mine]
                    request = m.Pin(self._connection.next_id(), own, timeout, _wanted(ref, others), True)
                    reply = await self._connection.request(request, m.Held, timeout)
            numbers = [number for number, *_ in reply.shards]
            try:
                named = dict(zip(numbers, mine + others, strict=True))
                layouts = _layouts(reply.shards)
                live = {named[number]: bits for number, _, _, _, _, bits in reply.shards if bits}
                if live:
                    _check_live(ref, live, {named[number]: layout for number, layout in layouts.items()})
                if reply.apart:
                    await self._check_apart(ref, {named[number]: number for number in reply.apart})
            except BaseException:
                self._connection.tell(m.Unpin(numbers))  # at once, and not when the error and its frames go
                raise
            segments = self._connection.segments
            for together in _together(reply.shards):
                pin = self._connection.pins.hold(*[number for number, *_ in together])
                views = self._views(together, pin)
                for number, segment, offset, size, _, _ in together:
                    view = views(segment, offset, size) if views is not None else None
                    shard = HeldShard(segments[segment], offset, size, pin, view)
                    held[named[number]] = Held(shard, size, layouts[number])
        opening = Opening(held)
        return Batch({name: opening.column(ref, name, field) for name, field in ref.schema.items()})

    def _mapped(self, ref: BatchRef, reply: m.Held) -> tuple[dict[ShardKey, Held], bool]:
        """The shards that other processes keep, mapped here; whether one could not be, and is to be had from the arena.
        Raises Freed."""
        mapped: dict[ShardKey, Held] = {}
        again = False
        pins = [self._connection.pins.hold(hold) for _, hold, *_ in reply.kept]  # which go with an error
        for pin, (number, hold, size, encoded, bits, handle) in zip(pins, reply.kept, strict=True):
            key = (self._connection.welcome.node, number)
            memory = keeping.mapped(hold, size, handle, pin, self._connection.pins.access)
            if memory is None:
                again = True
                continue
            layout = one(encoded, size)
            mapped[key] = Held(memory, size, layout)
            if bits:
                _check_live(ref, {key: bits}, {key: layout})
        return mapped, again

    def _views(self, together: Sequence[m.HeldOne], pin: Pin) -> Callable[[int, int, int], Bytes] | None:
        """Gives the bytes of shards that share a pin, by segment, offset and size, as parts of one array for each
        segment: an array of its own for each would take longer than reading it. None for a shard that is alone."""
        if len(together) == 1:
            return None
        spans: dict[int, tuple[int, int]] = {}
        for _, segment, offset, size, _, _ in together:
            start, end = spans.get(segment, (offset, offset + size))
            spans[segment] = min(start, offset), max(end, offset + size)
        whole = {
            segment: self._connection.segments[segment].mapping(writable=False).array(start, end - start, pin)
            for segment, (start, end) in spans.items()
        }

        def view(segment: int, offset: int, size: int) -> Bytes:
            start = offset - spans[segment][0]
            return whole[segment][start : start + size]

        return view

    async def _check_apart(self, ref: BatchRef, numbers: Mapping[ShardKey, int]) -> None:
        """Raises Freed where a row that the reference means was freed by itself, of large shards of these numbers here:
        the node is asked for the rows of the columns in question, some at a time."""
        for key, selected in ref.footprint().items():
            for ordinals, rows in selected if key in numbers else ():
                for first in range(rows.start, rows.stop, m.MAX_LIVE):
                    count = min(m.MAX_LIVE, rows.stop - first)
                    for ordinal in ordinals:
                        asked = m.LiveRows(self._connection.next_id(), numbers[key], ordinal, first, count)
                        bits = (await self._connection.request(asked, m.LiveBits, 0.0)).bits
                        if bits:
                            _check_some(bits, rows, first, count, key[1])

    def fetch_ahead(self, ref: BatchRef, timeout: float) -> None:
        """As `prefetch`, where some of it is on other hosts."""
        if self._parted(ref)[1]:
            self.prefetch(ref, timeout)

    def prefetch(self, ref: BatchRef, timeout: float) -> None:
        """Have the node read what the reference means into memory. Does not wait."""
        ref = ref.unlinked()
        mine, others = self._parted(ref)
        own = [shard for _, shard in mine]
        self._connection.tell(m.Prefetch(self._connection.next_id(), own, _wanted(ref, others), timeout))

    def _parted(self, ref: BatchRef) -> tuple[list[ShardKey], list[ShardKey]]:
        """The shards of a reference: this plane's node's own, and others'."""
        own, keys = self._connection.welcome.node, ref.shards()
        return [key for key in keys if key[0] == own], [key for key in keys if key[0] != own]


def _layouts(shards: Sequence[m.HeldOne]) -> dict[int, Laid]:
    """The layout of each shard, by number. Those of rows that were put alike are the same bytes, and looked at once."""
    different = list(dict.fromkeys([(encoded, size) for _, _, _, size, encoded, _ in shards]))
    found = laid([encoded for encoded, _ in different], [size for _, size in different])
    known = dict(zip(different, found, strict=True))
    return {number: known[encoded, size] for number, _, _, size, encoded, _ in shards}


def _together(shards: Sequence[m.HeldOne]) -> Iterator[Sequence[m.HeldOne]]:
    """The shards in the runs that share a pin."""
    start, nbytes = 0, 0
    for at, (_, _, _, size, _, _) in enumerate(shards):
        if at > start and nbytes + size > _TOGETHER:
            yield shards[start:at]
            start, nbytes = at, 0
        nbytes += size
    if shards:
        yield shards[start:]


def _wanted(ref: BatchRef, keys: Sequence[ShardKey]) -> list[m.Wanted]:
    """What of these shards the reference means."""
    footprint = ref.footprint() if keys else {}
    return [(*key, [(list(ordinals), rows.encode()) for ordinals, rows in footprint[key]]) for key in keys]


def _check_live(ref: BatchRef, live: Mapping[ShardKey, bytes], layouts: Mapping[ShardKey, Laid]) -> None:
    """Raises Freed where a row that the reference means was freed by itself."""
    for key, selected in ref.footprint().items():
        if key not in live:
            continue
        columns = layouts[key].layout.columns
        rows = columns[0][1].rows
        bits = np.unpackbits(np.frombuffer(live[key], dtype=np.uint8), count=len(columns) * rows)
        alive = bits.reshape(len(columns), rows).astype(np.bool_)
        for ordinals, chosen in selected:
            _check_rows(alive, ordinals, chosen, key[1])


def _check_some(bits: bytes, rows: Rows, first: int, count: int, shard: int) -> None:
    """Raises Freed where one of these rows that is among those from `first` on does not count, as the bits say."""
    dead = np.unpackbits(np.frombuffer(bits, np.uint8), count=count) == 0
    if rows.slice is not None:
        gone = np.flatnonzero(dead)
    else:
        inside = rows.array() - first
        inside = inside[(inside >= 0) & (inside < count)]
        gone = inside[dead[inside]]
    if len(gone):
        row, more = first + int(gone[0]), f"{len(gone) - 1} more of the {count} from row {first} on"
        raise Freed(f"row {row} of shard {shard} was freed, and {more}", shard=shard)


def _check_rows(alive: Any, ordinals: Sequence[int], chosen: Rows, shard: int) -> None:
    for ordinal in ordinals:
        gone = np.flatnonzero(~alive[ordinal, chosen.slice or chosen.array()])
        if len(gone):
            row = int(chosen.array()[gone[0]])
            raise Freed(f"row {row} of shard {shard} was freed, and {len(gone) - 1} more", shard=shard)
