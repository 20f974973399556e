"""The held shards of one reply: the place of each, its layout, and what keeps it there.

No object is made for each of thousands of small shards: they stay a table, from which `stack` takes many and `[key]`
one.

Invariants: each pin that the node granted is dropped once, with the last view of what it holds; small shards share
pins.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from dataplane.batch.layout import Outline
from dataplane.batch.layout_check import CheckedLayout, check_layouts
from dataplane.batch.ref import ShardKey
from dataplane.batch.stacks import Scattered, Stack
from dataplane.batch.stored_column import Memory
from dataplane.client.memory import Bytes, CarriedShard, HeldShard, Segment
from dataplane.client.pins import Pin
from dataplane.wire import messages as m
from dataplane.wire.places import ShardPlace, Table

_LEAST, _MOST = 256 << 10, 4 << 20
"""Bytes of small shards that share a pin, as the columns of one put share a shard: a quarter of all, within these
bounds. Dropping a pin is a message, and a few hundred of those take longer than reading what they hold."""


_FEW = 64
"""Shards up to which Python's own numbers are faster to read than those of a table."""


class PinnedShard(NamedTuple):
    """A held shard: its memory, size in bytes, and layout."""

    memory: Memory
    size: int
    laid: CheckedLayout


class ShardDescriptions:
    """What a reply says of held shards: their places, and their layouts, which are validated."""

    def __init__(self, places: Table, reply: m.Held) -> None:
        """Raises ProtocolMismatch, Corrupt."""
        self.places = places
        self._lives = reply.lives
        if len(places) == 1:
            self.laid = check_layouts(reply.layouts, [int(places[0, 3])])
        else:
            sizes = np.full(len(reply.layouts), np.iinfo(np.int64).max)
            np.minimum.at(sizes, places[:, 4], places[:, 3])  # a range within the smallest lies within each
            self.laid = check_layouts(reply.layouts, sizes.tolist())

    def live(self, keys: Sequence[ShardKey]) -> dict[ShardKey, tuple[bytes, CheckedLayout]]:
        """The live bits of the shards of which some rows were freed, and their layouts."""
        if not self._lives:
            return {}
        partly = np.flatnonzero(self.places[:, 5])
        rows = zip(partly.tolist(), self.places[partly, 4:].tolist(), strict=True)
        return {keys[at]: (self._lives[live - 1], self.laid[layout]) for at, (layout, live) in rows}


class Holding:
    """Held shards by key."""

    def __init__(
        self,
        keys: Sequence[ShardKey],
        mapped: Mapping[ShardKey, PinnedShard],
        described: ShardDescriptions | None,
        carried: bytes = b"",
    ) -> None:
        """`mapped`: those that other processes keep; `keys`: of those that are `described`, in that order, whose
        bytes are `carried` by the reply, or are to be held."""
        self._keys = keys
        self._mapped = mapped
        self._described = described
        self._places = np.empty((0, 6), np.int64) if described is None else described.places
        self._laid = [] if described is None else described.laid
        self._few = self._places.tolist() if len(keys) <= _FEW else None
        self._at = dict(zip(keys, range(len(keys)), strict=True))
        self._made: dict[ShardKey, PinnedShard] = {}
        self._segments: Mapping[int, Segment] = {}
        self._carried = carried
        self._starts: list[int] = []  # of the runs of shards that share a hold
        self._pins: list[Pin] = []
        self._arrays: dict[int, Callable[[ShardPlace], Bytes]] = {}  # by run

    def hold(self, segments: Mapping[int, Segment], pin: Callable[..., Pin]) -> None:
        """They are in these segments, and the node has granted one pin on each."""
        self._segments = segments
        numbers, sizes = self._places[:, 0].tolist(), self._places[:, 3].tolist()
        most, start, nbytes = max(_LEAST, min(_MOST, sum(sizes) // 4)), 0, 0
        for at, size in enumerate(sizes):
            if at > start and nbytes + size > most:
                self._share(pin, numbers, start, at)
                start, nbytes = at, 0
            nbytes += size
        if numbers:
            self._share(pin, numbers, start, len(numbers))

    def _share(self, pin: Callable[..., Pin], numbers: Sequence[int], start: int, stop: int) -> None:
        self._pins.append(pin(*numbers[start:stop]))
        self._starts.append(start)

    @cached_property
    def outline(self) -> Outline | None:
        """The outline of all of them; None if they have several."""
        outlines = {id(each): each for each in (laid.outline for laid in self._laid)}
        outlines |= {id(held.laid.outline): held.laid.outline for held in self._mapped.values()}
        return next(iter(outlines.values())) if len(outlines) == 1 else None

    def outlines(self, keys: Sequence[ShardKey]) -> list[Outline]:
        """The outlines of the layouts of these shards, each once."""
        if self._mapped:
            found = [self.laid(key) for key in keys]
        else:
            at = np.array([self._at[key] for key in keys], np.int64)
            found = [self._laid[number] for number in np.unique(self._places[at, 4]).tolist()]
        return list({id(laid.outline): laid.outline for laid in found}.values())

    def laid(self, key: ShardKey) -> CheckedLayout:
        """The layout of a shard."""
        if key in self._mapped:
            return self._mapped[key].laid
        return self._laid[self._place(self._at[key]).layout]

    def _place(self, at: int) -> ShardPlace:
        return ShardPlace._make(self._places[at].tolist() if self._few is None else self._few[at])

    def __getitem__(self, key: ShardKey) -> PinnedShard:
        found = self._mapped.get(key) or self._made.get(key)
        if found is None:
            at = self._at[key]
            place = self._place(at)
            found = self._made[key] = PinnedShard(self._memory(at, place), place.size, self._laid[place.layout])
        return found

    def _memory(self, at: int, place: ShardPlace) -> Memory:
        if place.segment < 0:
            return CarriedShard(self._carried, place.offset, place.size)
        run = bisect_right(self._starts, at) - 1
        stop = self._starts[run + 1] if run + 1 < len(self._starts) else len(self._keys)
        view = None
        if stop - self._starts[run] > 1:
            if run not in self._arrays:
                self._arrays[run] = self._views(self._places[self._starts[run] : stop], self._pins[run])
            view = self._arrays[run](place)
        return HeldShard(self._segments[place.segment], place.offset, place.size, self._pins[run], view)

    def _views(self, places: Table, keeps: object) -> Callable[[ShardPlace], Bytes]:
        """The bytes of these shards, as parts of one array for each segment, which keeps their pins: an array for
        each would take longer than reading it."""
        whole = self._spans(places, keeps)

        def view(place: ShardPlace) -> Bytes:
            array, first = whole[place.segment]
            return array[place.offset - first : place.offset - first + place.size]

        return view

    def _spans(self, places: Table, keeps: object) -> dict[int, tuple[Bytes, int]]:
        """For each segment of these shards, the part from the first of them to the last, and its offset."""
        found = {}
        for segment in np.unique(places[:, 1]).tolist():
            inside = places[places[:, 1] == segment]
            first, end = int(inside[:, 2].min()), int((inside[:, 2] + inside[:, 3]).max())
            found[segment] = self._segments[segment].mapping(writable=False).array(first, end - first, keeps), first
        return found

    def stack(self, keys: Sequence[ShardKey]) -> Stack:
        """Shards with one outline, to be read in one pass."""
        if self._carried or (self._mapped and any(map(self._mapped.__contains__, keys))):
            held = [self[key] for key in keys]
            table = np.array([each.laid.numbers for each in held])
            return Stack(held[0].laid.outline, table, Scattered.of([each.memory.read(0, each.size) for each in held]))
        places = self._places if keys is self._keys else self._places[[self._at[key] for key in keys]]
        first = self._laid[int(places[0, 4])]
        if len(self._laid) == 1:
            table = np.broadcast_to(first.numbers, (len(places), len(first.numbers)))
        else:
            used, inverse = np.unique(places[:, 4], return_inverse=True)
            table = np.array([self._laid[at].numbers for at in used.tolist()])[inverse]
        spans = self._whole
        bases = np.array([start for _, start in spans.values()])
        which = np.searchsorted(list(spans), places[:, 1])
        memories = [array for array, _ in spans.values()]
        return Stack(first.outline, table, Scattered(memories, which, places[:, 2] - bases[which]))

    @cached_property
    def _whole(self) -> dict[int, tuple[Bytes, int]]:
        """See `_spans`; of all shards, by ascending segment."""
        return self._spans(self._places, tuple(self._pins))
