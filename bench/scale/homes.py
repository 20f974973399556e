"""The rows that wait at each home of a simulation, given by the library's own sampler.

What always holds: what has come is ready, given or acked, and no two of these; a group is given whole.
"""

from __future__ import annotations

import numpy as np

from bench.scale.events import Index
from dataplane.stream.choosing import _WINDOW
from dataplane.stream.sampler import Candidates, CompleteGroups, checked

WINDOW = _WINDOW
"""Rows that a home shows to a sampler first."""

_SHOWN = 4
"""Of so many times the rows that are wanted this model computes the choice: all groups here come complete, so more rows
do not change it. Their cost is that of all that are shown."""


class Rows:
    """Rows in the order in which they came: by row its group, the host that stores it, and the append it is of."""

    __slots__ = ("group", "owner", "shard")

    def __init__(self, group: Index, owner: Index, shard: Index) -> None:
        self.group, self.owner, self.shard = group, owner, shard

    def __len__(self) -> int:
        return len(self.group)

    def __getitem__(self, at: Index | slice) -> Rows:
        return Rows(self.group[at], self.owner[at], self.shard[at])

    @classmethod
    def together(cls, parts: list[Rows]) -> Rows:
        if len(parts) == 1:
            return parts[0]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__slots__))


class Homes:
    """Those of one stream, one a host."""

    def __init__(self, hosts: int, group: int) -> None:
        self.ready = np.zeros(hosts, np.int64)
        self.came = self.acked = 0
        self._waiting: list[list[Rows]] = [[] for _ in range(hosts)]
        self._sampler = CompleteGroups(group)

    def bring(self, home: int, rows: Rows) -> None:
        """Rows come."""
        self._waiting[home].append(rows)
        self.ready[home] += len(rows)
        self.came += len(rows)

    def give(self, home: int, want: int, least: int) -> Rows | None:
        """Rows that the sampler chooses, at least so many; None where there are not."""
        if self.ready[home] < least:
            return None
        parts, taken = self._waiting[home], 0
        while taken < len(parts) and sum(map(len, parts[:taken])) < _SHOWN * want:
            taken += 1
        shown = Rows.together(parts[:taken])
        count = np.bincount(np.unique(shown.group, return_inverse=True)[1])
        members = count[np.unique(shown.group, return_inverse=True)[1]]
        candidates = Candidates(
            group=shown.group,
            version=np.zeros(len(shown), np.int64),
            age_s=np.zeros(len(shown)),
            group_rows=members,
            group_dropped=np.zeros(len(shown), np.int64),
            lengths={},
            tags={},
            latest=0,
            closed=False,
            whole=taken == len(parts),
        )
        choice = checked(self._sampler.choose(candidates, want), candidates, want)
        if len(choice.rows) < least and not choice.full:
            return None
        left = np.ones(len(shown), bool)
        left[choice.rows] = False
        rest = shown[np.flatnonzero(left)]
        parts[:taken] = [rest] if len(rest) else []
        self.ready[home] -= len(choice.rows)
        return shown[choice.rows]

    def take_back(self, home: int, rows: Rows) -> None:
        """Rows that were given are offered again, before the others."""
        self._waiting[home].insert(0, rows)
        self.ready[home] += len(rows)

    def ack(self, rows: Rows) -> None:
        """Rows are done with."""
        self.acked += len(rows)
