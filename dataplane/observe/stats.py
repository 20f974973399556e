"""The result of `plane.stats()`: a node's statistics at one moment, as a frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """A node's statistics. Sizes in bytes, times in seconds; totals count from the node's start.

    memory_used counts every extent, whether stored, pinned or reserved, and never exceeds memory_budget.
    memory_resident counts the pages of the node's shared memory, with warm free ones, within the same budget.
    fetched_bytes were read from other nodes, and sent_bytes by other nodes, which have confirmed it. copies are other
    nodes' shards that are known here; they count as shards too. asked counts requests to other nodes, and answered
    requests from them, without bulk data. leads and follows are the partitions of streams and tables that this node
    leads or follows, each with the epoch of its replica set.

    waiting is the number of requests that wait for memory now, and waiters names their processes, at most 8. waits is
    the number of requests that have ever waited, and waited_s the time of their waits. holders lists the holders of
    memory, the largest first, and then those of the disk: dicts of `holder`, a process; `bytes`; `how` ("pinned",
    "reserved", "stored", "spilled"); `owner` ("stream NAME", "table NAME", "scope NAME", or empty); and `oldest_s`, the
    age of the oldest shard of these.

    streams has the statistics of the streams by name, of the first 50 if there are more. streams_in_all is the number
    of all streams, and `plane.streams()` returns the statistics of all. tables and tables_in_all are the same for
    tables. Only streams and tables that this node leads count.

    metrics is HOST:PORT if the node serves `/metrics`; empty otherwise.
    """

    memory_used: int = 0
    memory_budget: int = 0
    memory_peak: int = 0
    memory_resident: int = 0
    disk_used: int = 0
    disk_budget: int = 0
    shards: int = 0
    spilled_shards: int = 0
    pinned_bytes: int = 0
    reserved_bytes: int = 0
    waiting: int = 0
    waiting_bytes: int = 0
    waiters: tuple[str, ...] = ()
    waits: int = 0
    waited_s: float = 0.0
    put_bytes: int = 0
    freed_bytes: int = 0
    spilled_bytes: int = 0
    restored_bytes: int = 0
    fetched_bytes: int = 0
    sent_bytes: int = 0
    copies: int = 0
    asked: int = 0
    answered: int = 0
    spill_error: str = ""
    holders: tuple[Mapping[str, Any], ...] = ()
    streams: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    streams_in_all: int = 0
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tables_in_all: int = 0
    leads: Mapping[str, int] = field(default_factory=dict)
    follows: Mapping[str, int] = field(default_factory=dict)
    clients: int = 0
    node: str = ""
    address: str = ""
    metrics: str = ""
    pid: int = 0
    uptime_s: float = 0.0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Stats:
        """The statistics that a node sent. Values unknown to this version are left out."""
        known = {each.name for each in fields(cls)}
        given = {name: value for name, value in values.items() if name in known}
        return cls(**given | {name: tuple(given.get(name, ())) for name in ("holders", "waiters")})
