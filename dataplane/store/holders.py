"""The holders of a store's memory and disk, for statistics and for the errors of requests that get no memory."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from dataplane.clock import Clock
from dataplane.config import format_size
from dataplane.store.budget import Holders
from dataplane.store.client_shards import ClientShards
from dataplane.store.pins import Pins
from dataplane.store.reservations import Reservations
from dataplane.store.residency import Residency
from dataplane.store.shards import Shards
from dataplane.store.spill import Disk
from dataplane.store.spill_file import SpillFile

_HOLDERS = 64  # the most holders in the result
_HOLDERS_S = 1.0  # the least seconds between two scans of more than `_MANY` shards
_MANY = 4096


class MemoryHolders:
    """The holders of the memory of one store."""

    def __init__(
        self,
        shards: Shards,
        pins: Pins,
        reservations: Reservations,
        kept: ClientShards,
        residency: Residency,
        disk: Disk,
        clock: Clock,
    ) -> None:
        self._shards = shards
        self._pins = pins
        self._reservations = reservations
        self._kept = kept
        self._residency = residency
        self._disk = disk
        self._clock = clock
        self._last_holders: tuple[dict[str, Any], ...] = ()
        self._holders_until = 0.0

    def all(self) -> tuple[dict[str, Any], ...]:
        """At most `_HOLDERS` holders, of memory before disk, the largest first: `holder` (a process), `bytes`, `how`
        ("pinned", "reserved", "stored", "spilled"), `owner` ("stream NAME", "table NAME", "scope NAME", or empty) and
        `oldest_s`, the age of the oldest shard of these; 0 for reservations. With more than `_MANY` shards
        the result may be `_HOLDERS_S` old: each failed request for memory needs it, and a scan visits all shards."""
        now = self._clock()
        if len(self._shards) > _MANY and now < self._holders_until:
            return self._last_holders
        self._last_holders, self._holders_until = self._held_by(now), now + _HOLDERS_S
        return self._last_holders

    def explain(self, full: bool) -> Holders:
        """The holders, and the reason why no more bytes can go to disk. `full`: new bytes were refused, to keep room
        for reading back."""
        return Holders(self.all(), self._disk.error or self._disk_full(full))

    def _disk_full(self, refused: bool) -> str:
        if not self._disk.quota:
            return "spilling is off"
        if not refused and not self._residency.disk_full:
            return ""
        used, room = format_size(self._disk.used), format_size(self._disk.room)
        if self._disk.room < self._disk.quota:  # a larger budget would not help
            full = f"the disk of {self._disk.directory} is full: {used} of the {room} that it has for spill files"
        else:
            full = f"the disk budget is full: {used} of {room}"
        largest = format_size(self._shards.rooms.largest)
        return f"{full}; to read shards back, twice the largest one ({largest}) stays free in memory and disk together"

    def _held_by(self, now: float) -> tuple[dict[str, Any], ...]:
        """See `all`."""
        held: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        since: dict[tuple[str, str, str], float] = {}
        for client, nbytes in self._reservations:
            held[str(client), "reserved", ""] += nbytes
        for client, numbers in self._pins.by_client().items():
            for number in numbers:
                if number not in self._kept:  # a handle keeps memory of a client
                    shard = self._shards.held(number)
                    key = str(client), "pinned", shard.owner or _scope(shard.scope)
                    held[key] += shard.held
                    since[key] = min(since.get(key, now), shard.since_s)
        stored: dict[tuple[str, str, str], list[float]] = {}  # -> bytes, and since when the oldest is here
        pinned = self._pins.shards()
        for shard in self._shards.values():  # the oldest first
            if shard.extent is None and isinstance(shard.file, SpillFile):
                key = shard.holder, "spilled", shard.owner or _scope(shard.scope)
                held[key] += shard.file.size
                since.setdefault(key, shard.since_s)
            elif shard.extent is not None and shard.number not in pinned:
                whose = shard.holder, shard.owner, shard.scope
                if whose in stored:
                    stored[whose][0] += shard.size if shard.shared else shard.held
                else:
                    stored[whose] = [shard.held, shard.since_s]
        for (holder, owner, scope), (held_bytes, since_s) in stored.items():
            key = holder, "stored", owner or _scope(scope)
            held[key] += int(held_bytes)
            since.setdefault(key, since_s)
        ordered = sorted(held.items(), key=lambda item: (item[0][1] == "spilled", -item[1]))
        return tuple(
            {"holder": key[0], "bytes": n, "how": key[1], "owner": key[2], "oldest_s": now - since.get(key, now)}
            for key, n in ordered[:_HOLDERS]
            if n
        )


def _scope(scope: str) -> str:
    """A scope in the form of `holders`; empty for none, and for scopes of the node itself."""
    return f"scope {scope}" if scope and scope.isprintable() else ""
