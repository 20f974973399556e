"""Reads references: pins and maps their shards, and assembles columns from them.

Invariants: a get that fails or is cancelled leaves nothing pinned. Its result stays valid as long as a view of it
exists, also after the plane is closed.

Most gets are of contiguous rows of one shard. They take a fast path (`SpanShard`), with the same results and errors as
the general path. The positions of the columns in the shard are cached there (`_layouts`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

from dataplane.batch import cuts, locations
from dataplane.batch.batch import Batch, Column
from dataplane.batch.field import Field, refuse
from dataplane.batch.layout import ColumnLayout
from dataplane.batch.layout_check import CheckedLayout, check_layout
from dataplane.batch.locations import RowSpan, shard_of
from dataplane.batch.ref import BatchRef, ShardKey
from dataplane.batch.stored_column import ExtentMemory, Selection, StoredColumn, check_fits
from dataplane.client import kept_columns
from dataplane.client.column_assembly import ColumnAssembly, HeldShards, PinnedShard
from dataplane.client.connection import Connection, Exchange
from dataplane.client.memory import CarriedShard, HeldShard, NodeSegment
from dataplane.client.ownership import portions
from dataplane.client.pins import ShardPin
from dataplane.errors import Freed, LimitExceeded, Misuse, ProtocolMismatch
from dataplane.store.live_cells import LiveBlock, LiveCells
from dataplane.wire import shard_messages as sm
from dataplane.wire.places import ShardPlace, numbers, only

_NAMED = 5  # at most so many columns are named in an error
_ALL: Mapping[ShardKey, sm.ChunkPart] = {}


_PART_BYTES, _SHARD_BYTES = 1 << 20, 256  # bytes of a message, and of a shard in it without its byte ranges


class Getter:
    """The reads of one connection. Used from its event loop only."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def get(self, ref: BatchRef, timeout: float) -> Batch:
        """Read the rows and columns of a reference. Raises as `AsyncPlane.get`."""
        asked = self.getting(ref, timeout)
        if asked is None:
            return _opened(ref, HeldShards([], {}))
        try:
            return await self._connection.exchange(asked)
        except Freed as error:
            raise with_columns(error, ref) from error

    def getting(self, ref: BatchRef, timeout: float) -> Exchange[sm.Held, Batch] | None:
        """The first request of a get, often the only one; None if the reference has no shards."""
        span = locations.span_of(ref)
        if span is not None and span.shard.node == self._connection.welcome.node:
            return self._getting_span(ref, span, timeout)
        ref = locations.unlinked(ref)
        mine, others = self._parted(ref)
        if not mine and not others:
            return None

        def finish(reply: sm.Held) -> Batch | Coroutine[Any, Any, Batch]:
            if reply.kept:
                return self._rest(ref, mine, others, reply, timeout)
            return _opened(ref, self._holding(ref, [*mine, *others], {}, reply))

        request = self._pin(ref, mine, others, timeout, devices=True)
        return Exchange(self._connection, request, sm.Held, timeout, finish)

    async def hold(
        self, ref: BatchRef, timeout: float, chunks: Mapping[ShardKey, sm.ChunkPart] = _ALL
    ) -> dict[ShardKey, PinnedShard]:
        """Pin the shards of a reference. Returns them by key, without reading columns. Each host fetches the shards of
        other hosts in another order. `chunks`: for each of those, the byte ranges to fetch, and the differences to
        older versions (`PinShards.chunks`). Raises as `get`."""
        ref = locations.unlinked(ref)
        mine, others = self._parted(ref)
        first = int.from_bytes(self._connection.welcome.node, "big") % max(1, len(others))
        wanted = _wanted(ref, others)
        order = [*range(first, len(others)), *range(first)]
        asking = [
            self._hold(ref, some, [], [], timeout) for some in portions(mine, lambda _: _SHARD_BYTES, _PART_BYTES)
        ]
        sizes = [_SHARD_BYTES + (len(chunks[key][0]) if chunks else 0) for key in others]
        for some in portions(order, sizes.__getitem__, _PART_BYTES):
            said = [chunks[others[at]] for at in some] if chunks else []
            asking.append(self._hold(ref, [], [wanted[at] for at in some], said, timeout))
        found: dict[ShardKey, PinnedShard] = {}
        for held in await asyncio.gather(*asking):
            found |= held
        return found

    async def hold_own(self, shards: Sequence[int], timeout: float) -> list[PinnedShard]:
        """Pin these shards of this plane's node. Returns them. Raises as `get`, and Freed if a row of one was freed."""
        own = self._connection.welcome.node
        keys = [(own, shard) for shard in shards]
        found: dict[ShardKey, PinnedShard] = {}
        for some in portions(keys, lambda _: _SHARD_BYTES, _PART_BYTES):
            found |= await self._hold(None, some, [], [], timeout)
        return [found[key] for key in keys]

    async def _hold(
        self,
        ref: BatchRef | None,
        mine: list[ShardKey],
        others: list[sm.Wanted],
        chunks: list[sm.ChunkPart],
        timeout: float,
    ) -> dict[ShardKey, PinnedShard]:
        own = [shard for _, shard in mine]
        request = sm.PinShards(self._connection.next_id(), own, timeout, others, False, True, [], chunks)
        reply = await self._connection.request(request, sm.Held, timeout)
        keys = [*mine, *((node, shard) for node, shard, _ in others)]
        holding = self._holding(ref, keys, {}, reply)
        return {key: holding[key] for key in keys}

    def _getting_span(self, ref: BatchRef, span: RowSpan, timeout: float) -> Exchange[sm.Held, Batch]:
        """The request for contiguous rows of one shard of this plane's node."""
        keys = [span.shard[:2]]

        def finish(reply: sm.Held) -> Batch | Coroutine[Any, Any, Batch]:
            if reply.kept:
                return self._rest(ref, keys, [], reply, timeout)
            if reply.lives:
                return _opened(ref, self._holding(ref, keys, {}, reply))
            try:
                shown = SpanShard(reply)
            except BaseException:
                self._let_go(reply)  # at once, not when the error's frames are garbage-collected
                raise
            return shown.opened(span, self._connection.segments, self._connection.pins.hold)

        request = sm.PinShards(self._connection.next_id(), [span.shard.id], timeout, [], True, True)
        return Exchange(self._connection, request, sm.Held, timeout, finish)

    async def _rest(
        self, ref: BatchRef, mine: list[ShardKey], others: list[ShardKey], reply: sm.Held, timeout: float
    ) -> Batch:
        """Map the shards of the reply that other processes keep, and return the batch."""
        try:
            mapped, again = self._mapped(ref, reply)
        except BaseException:
            self._let_go(reply)
            raise
        mine = [key for key in mine if key not in mapped]
        if again:
            self._let_go(reply)
            reply = await self._connection.request(self._pin(ref, mine, others, timeout), sm.Held, timeout)
        return _opened(ref, self._holding(ref, [*mine, *others], mapped, reply))

    def _holding(
        self, ref: BatchRef | None, keys: list[ShardKey], mapped: dict[ShardKey, PinnedShard], reply: sm.Held
    ) -> HeldShards:
        """The shards of the reply, which are pinned or contained in it, and those in `mapped`. Raises Freed."""
        try:
            holding = HeldShards(keys, mapped, reply)
            live = holding.live()
            if live and ref is None:
                raise Freed("rows of shards that are read whole were freed")
            if live and ref is not None:
                _check_live(ref, live)
        except BaseException:
            self._let_go(reply)  # at once, as in `_getting_span`
            raise
        if not reply.carried:
            holding.hold(self._connection.segments, self._connection.pins.hold)
        return holding

    def _pin(
        self, ref: BatchRef, mine: list[ShardKey], others: list[ShardKey], timeout: float, *, devices: bool = False
    ) -> sm.PinShards:
        own, wanted, parts = [shard for _, shard in mine], _wanted(ref, others), _parts(ref, others)
        return sm.PinShards(self._connection.next_id(), own, timeout, wanted, devices, True, parts)

    def _let_go(self, reply: sm.Held) -> None:
        """Release the pins that the node has granted with the reply."""
        if not reply.carried:
            self._connection.tell(sm.UnpinShards(numbers(reply.places)))

    def _mapped(self, ref: BatchRef, reply: sm.Held) -> tuple[dict[ShardKey, PinnedShard], bool]:
        """Map the shards that other processes keep. Returns them, and whether one could not be mapped and has to be
        read from the node's memory. Raises Freed."""
        mapped: dict[ShardKey, PinnedShard] = {}
        again = False
        pins = [self._connection.pins.hold(hold) for _, hold, *_ in reply.kept]  # dropped if this fails
        for pin, (number, hold, size, encoded, live, handle) in zip(pins, reply.kept, strict=True):
            key = (self._connection.welcome.node, number)
            memory = kept_columns.mapped(hold, size, handle, pin, self._connection.pins.access)
            if memory is None:
                again = True
                continue
            layout = check_layout(encoded, size)
            mapped[key] = PinnedShard(memory, size, layout)
            if live:
                _check_live(ref, {key: (live, layout)})
        return mapped, again

    def fetch_ahead(self, ref: BatchRef, timeout: float) -> None:
        """Prefetch a reference if some of its shards are on other hosts."""
        if self._parted(ref)[1]:
            self.prefetch(ref, timeout)

    def prefetch(self, ref: BatchRef, timeout: float) -> None:
        """Have the node read a reference into memory. Does not wait."""
        ref = locations.unlinked(ref)
        mine, others = self._parted(ref)
        own = [shard for _, shard in mine]
        wanted, parts = _wanted(ref, others), _parts(ref, others)
        with suppress(LimitExceeded):  # a reference with too many parts for a message is not prefetched
            self._connection.tell(sm.Prefetch(self._connection.next_id(), own, wanted, timeout, parts))

    def _parted(self, ref: BatchRef) -> tuple[list[ShardKey], list[ShardKey]]:
        """The shards of a reference: those of this plane's node, and others."""
        own, keys = self._connection.welcome.node, ref.shards()
        others = [key for key in keys if key[0] != own]
        return [key for key in keys if key[0] == own] if others else list(keys), others


def _opened(ref: BatchRef, holding: HeldShards) -> Batch:
    opening = ColumnAssembly(holding)
    return Batch({name: opening.column(ref, name, field) for name, field in ref.schema.items()})


def _wanted(ref: BatchRef, keys: Sequence[ShardKey]) -> list[sm.Wanted]:
    """The parts of these shards that the reference refers to."""
    footprint = locations.footprint(ref) if keys else {}
    return [(*key, [(list(ordinals), rows.encode()) for ordinals, rows in footprint[key]]) for key in keys]


def _parts(ref: BatchRef, keys: Sequence[ShardKey]) -> list[sm.RowParts]:
    """For each of these shards, the slices of rows that the reference refers to; empty if it refers to whole rows."""
    if not keys or not ref.is_sliced():
        return []
    wanted = locations.wanted(ref)
    return [[(list(o), rows.encode(), cuts.encode(cut)) for o, rows, cut in wanted[key]] for key in keys]


def _check_live(ref: BatchRef, live: Mapping[ShardKey, tuple[list[LiveBlock], CheckedLayout]]) -> None:
    """Raise Freed if a row of the reference was freed. `live`: the live blocks of shards with freed rows."""
    for key, selected in locations.footprint(ref).items():
        if key not in live:
            continue
        told, layout = live[key]
        columns = layout.layout.columns
        cells = LiveCells.of(told, len(columns), columns[0][1].rows)
        for ordinals, rows in selected:
            gone = cells.freed(ordinals, rows)
            if len(gone):
                more = f", and {len(gone) - 1} more" if len(gone) > 1 else ""
                raise Freed(f"row {gone[0]} of shard {key[1]} was freed{more}", shard=key[1])


def with_columns(error: Freed, ref: BatchRef) -> Freed:
    """The same error, with the columns of the reference that are in the freed shard."""
    names = [] if error.shard < 0 or error.columns else [n for n in ref.columns if _is_in(ref, n, error.shard)]
    if not names:
        return error
    named = f"column{'s' if names[1:] else ''} {', '.join(map(repr, names[:_NAMED]))}"
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return Freed(f"{named}{more}: {error}", **{**error.fields, "columns": tuple(names)})


def _is_in(ref: BatchRef, column: str, shard: int) -> bool:
    return any(shard_of(piece.shard) == shard_of(shard) for piece in locations.sources(ref, column)[0])


_FEW = 64
"""The most columns of a reference whose column positions are cached (`_known`)."""


class SpanShard:
    """The only shard of a reply, with a validated layout. Keeps no pin until it is `opened`."""

    def __init__(self, reply: sm.Held) -> None:
        """Raises ProtocolMismatch, Corrupt."""
        self._place: ShardPlace = only(reply.places)
        self._carried = reply.carried
        if not 0 <= self._place.layout < len(reply.layouts):
            raise ProtocolMismatch("a shard without a layout")
        self._laid = check_layout(reply.layouts[self._place.layout], self._place.size)

    def opened(self, span: RowSpan, segments: Mapping[int, NodeSegment], pin: Callable[[int], ShardPin]) -> Batch:
        """Read these rows of the shard. Returns a batch, which keeps the pin that the node has granted. An error drops
        the pin. Raises Corrupt, and Misuse if the shard has no such column."""
        number, segment, offset, size, *_ = self._place
        memory: ExtentMemory
        if segment < 0:
            memory = CarriedShard(self._carried, offset, size)
        else:
            held = pin(number)  # dropped if this fails
            memory = HeldShard(segments[segment], offset, size, held)
        layouts = (_known if len(span.columns) <= _FEW else _layouts)(span.columns, self._laid)
        rows, columns = span.rows, {}
        if rows.stop > self._laid.rows:
            raise refuse(span.columns[0][0], f"row {rows.stop - 1} of a shard with {self._laid.rows}")
        for (name, field, _), layout in zip(span.columns, layouts, strict=True):
            columns[name] = Column(name, field, (Selection(StoredColumn(name, layout, memory), rows),))
        return Batch(columns)


def _layouts(columns: tuple[tuple[str, Field, int], ...], laid: CheckedLayout) -> tuple[ColumnLayout, ...]:
    """The validated layouts of columns with these names, fields and ordinals. Raises Misuse, Corrupt."""
    there = laid.layout.columns
    found = []
    for name, field, ordinal in columns:
        if ordinal >= len(there):
            raise Misuse(f"the reference means column {ordinal} of a shard that has {len(there)}")
        layout = there[ordinal][1]
        check_fits(name, layout.field, field)
        found.append(layout)
    return tuple(found)


_known = lru_cache(maxsize=256)(_layouts)
