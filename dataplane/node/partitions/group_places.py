"""Which partition a group or key belongs to: by the newest table, unless an older one's partition holds part of it.

What always holds: a partition that was asked, and has no part of a group, takes the first row of it by no older table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dataplane.clock import Deadline
from dataplane.cluster.placement import Index
from dataplane.errors import Lost
from dataplane.node.partitions.requests import ASK_S, Requests
from dataplane.node.partitions.router import Router
from dataplane.node.partitions.table import Flags, Table

MAX_DISOWNED = 1 << 17
"""Groups and keys of a stream of which this node remembers that older partitions have none."""


class Placed(NamedTuple):
    """Groups or keys that have one partition: its number, the version of the table by which that is so, which rows of
    them say, and their positions."""

    number: int
    version: int
    positions: Index


class GroupPlaces:
    """See the module."""

    def __init__(self, router: Router, requests: Requests) -> None:
        self._router = router
        self._requests = requests
        self._disowned: dict[tuple[str, str], dict[tuple[int, str | int], int]] = {}
        """By stream and generation: which groups a partition has disowned, for the sake of which version."""

    async def place(self, table: Table, groups: Sequence[str | int]) -> list[Placed]:
        """The partitions of these groups or keys. What older versions of the table have elsewhere is asked for there,
        and has no first row there any more by them. A partition that then says that rows have moved knows of a newer
        version: `read` it. Raises Unavailable, PeerUnavailable, OutcomeUnknown."""
        now = table.place(groups)
        versions = np.full(len(groups), table.version)
        settled = np.zeros(len(groups), np.bool_)
        for version, positions, numbers in table.moved(groups, now):
            left = ~settled[positions]
            for number in np.unique(numbers[left]).tolist():
                asked = positions[left & (numbers == number)]
                held = asked[await self._held(table, version, number, [groups[at] for at in asked.tolist()])]
                now[held], versions[held], settled[held] = number, version, True
        both = np.stack((now, versions))
        return [
            Placed(number, version, np.flatnonzero((both[0] == number) & (both[1] == version)))
            for number, version in np.unique(both, axis=1).T.tolist()
        ]

    async def _held(self, table: Table, version: int, number: int, groups: list[str | int]) -> Flags:
        """Of which of these groups a partition holds a part, to which an older version of the table has them."""
        known = self._disowned.setdefault((table.stream, table.generation), {})
        unknown = [at for at, group in enumerate(groups) if known.get((number, group), 0) <= version]
        held = np.zeros(len(groups), np.bool_)
        if not unknown:
            return held
        asked = [groups[at] for at in unknown]
        request = self._requests.disowning(asked, table.version)
        try:
            answer = await self._router.ask(table.key(number), request, Deadline.after(ASK_S))
        except Lost:  # with all that it held
            return held
        held[unknown] = np.frombuffer(answer, np.bool_)
        if len(known) > MAX_DISOWNED:
            known.clear()
        known.update(((number, groups[at]), table.version) for at in unknown if not held[at])
        return held

    def settled(self, stream: str, generation: str) -> None:
        """Nothing is asked by older tables of this stream any more."""
        self._disowned.pop((stream, generation), None)
