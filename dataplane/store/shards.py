"""The shards of a store, by number and by the scope of their put, and the errors for shards that are gone.

Invariants: a shard that exists is an item. A shard that was freed while pinned is in `freed` instead, until its last
pin is dropped. A scope without shards does not exist. Only the store adds and removes shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple, cast

import numpy as np

from dataplane.batch.locations import shard_of
from dataplane.clock import Clock
from dataplane.errors import Freed
from dataplane.store.live_cells import LiveBlock
from dataplane.store.shard import Shard
from dataplane.store.stored import Rooms

_damage_of, _layout_of = attrgetter("damage"), attrgetter("layout")
_PLACE = 64  # bytes: an upper bound for a shard's description without its layout


class Shards(dict[int, Shard]):
    """The shards of one store. `freeings`: the last freed shards, and the cause of the current free."""

    def __init__(self, clock: Clock) -> None:
        self.freeings = Freeings(clock)
        self._clock = clock
        self.freed: dict[int, Shard] = {}
        self.rooms = Rooms()
        """The sizes in memory of these shards, and of reservations."""
        self._scopes: dict[str, set[int]] = {}

    def add(self, shard: Shard) -> None:
        """Add a new shard, also to its scope if it has one."""
        shard.since_s = self._clock()
        self[shard.number] = shard
        self.rooms.add(shard.room)
        if shard.scope:
            self._scopes.setdefault(shard.scope, set()).add(shard.number)

    def remove(self, shard: Shard) -> None:
        del self[shard.number]
        self.rooms.remove(shard.room)

    def unscope(self, numbers: Iterable[int]) -> None:
        """Remove these shards from their scopes. Numbers of freed shards are ignored."""
        for number in numbers:
            shard = self.get(number)
            if shard is not None and shard.scope:
                others = self._scopes[shard.scope]
                others.discard(number)
                if not others:
                    del self._scopes[shard.scope]
                shard.scope = ""

    def under(self, scope: str) -> list[int]:
        """The numbers of the shards that were put under the scope and not freed."""
        return list(self._scopes.get(scope, ()))

    def find(self, number: int) -> Shard:
        """Return the shard. Raises Freed if it is gone, or its `damage` if its bytes cannot be read."""
        shard = self.get(number)
        if shard is None:
            raise self.freeings.error(number)
        if shard.damage is not None:
            raise shard.damage.with_traceback(None)  # each caller raises the same error
        return shard

    def find_all(self, numbers: Sequence[int]) -> list[Shard]:
        """Return these shards. Raises Freed, or the `damage` of a shard. Creates no Python object for each shard."""
        found = list(map(self.get, numbers))
        if not all(found) or any(map(_damage_of, found)):
            return [self.find(number) for number in numbers]
        return cast("list[Shard]", found)

    def of(self, number: int) -> Shard | None:
        """The shard with this number, or with a link of this number; None if it is gone."""
        return self.get(shard_of(number))

    def held(self, number: int) -> Shard:
        """A pinned shard, whether or not it was freed."""
        return self.get(number) or self.freed[number]

    def ready(self, number: int) -> bool:
        """Whether the shard is in memory, so that it can be pinned without waiting."""
        shard = self.get(number)
        return shard is not None and shard.extent is not None and shard.damage is None

    def describe(self, numbers: Sequence[int]) -> list[tuple[int, int, int, bytes, list[LiveBlock]]]:
        """The bytes, rows, columns, encoded layout and live blocks of each shard, for other nodes. Raises as `find`."""
        return [(s.size, s.rows, s.columns, s.layout, s.live_blocks()) for s in self.find_all(numbers)]

    def described_nbytes(self, numbers: Sequence[int]) -> int:
        """The approximate bytes of a message that describes these shards. Raises as `find`."""
        shards = self.find_all(numbers)
        layouts = set(map(_layout_of, shards))
        lives = sum([s.live.nbytes for s in shards if s.live is not None])
        return _PLACE * len(shards) + sum(map(len, layouts)) + lives

    def clear_error(self, number: int) -> bool:
        """Clear the `damage` of a shard, so that its next use reads it again. Returns whether the shard exists."""
        shard = self.get(number)
        if shard is not None:
            shard.damage = None
        return shard is not None


_KEPT = 4096  # the freed shards whose causes are kept, for the errors of later readers
_NAME = "U120"  # NumPy drops the characters of a name beyond these
_CAUSE = np.dtype([("at_s", "f8"), ("how", "U6"), ("who", _NAME), ("scope", _NAME)])
_HOW = {
    "free": "by plane.free of {who}",
    "scope": "with its scope by plane.free of {who}",
    "stream": "since no task of stream {who!r} needs its rows any more",
}


class FreeCause(NamedTuple):
    """The cause of a free. `how`: the operation, empty if unknown. `who`: the client, or the name of the stream."""

    how: Literal["", "free", "scope", "stream"]
    who: str


UNKNOWN = FreeCause("", "")


class Freeings:
    """The last shards of a store that were freed as a whole. `cause`: the cause of the next frees; the caller of the
    store sets it.

    Both arrays are rings of the last `_KEPT`, of a fixed size: each object that is kept would keep 1 MiB of an arena.
    """

    def __init__(self, clock: Clock) -> None:
        self.cause = UNKNOWN
        self._clock = clock
        self._numbers = np.full(_KEPT, -1)
        self._causes = np.zeros(_KEPT, _CAUSE)
        self._count = 0

    def note(self, number: int, scope: str) -> None:
        """Record the free of a shard that was put under this scope (empty: none)."""
        at = self._count % _KEPT
        self._numbers[at], self._causes[at] = number, (self._clock(), *self.cause, scope)
        self._count += 1

    def error(self, number: int) -> Freed:
        """The error for a shard that no longer exists."""
        found = np.flatnonzero(self._numbers == number)
        if not found.size:
            return Freed(f"shard {number} was freed", shard=number)
        at_s, how, who, scope = self._causes[found[0]].item()
        age_s = max(0.0, self._clock() - at_s)
        under = f", put under scope {scope!r}," if scope else ""
        why = " " + _HOW[how].format(who=who) if how else ""
        message = f"shard {number}{under} was freed {age_s:.1f} s ago{why}"
        return Freed(message, shard=number, scope=scope, freed_by=who, age_s=age_s)
