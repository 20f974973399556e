"""The leader of each partition as the hosts report it, and events: failovers, and members that join or leave.

Invariants: if two hosts claim to lead a partition, the claim with the newer epoch counts. A partition whose leader is
gone or silent is `leaderless` until another host leads it or `FORGET_S` have passed. A partition that a responsive
leader no longer names was dropped, and is forgotten. Only the newest `EVENTS` events are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from dataplane.web.cluster_view import ClusterView
from dataplane.web.samples import clipped

EVENTS = 100
FORGET_S = 120.0
_PARTITIONS = 65_536


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """An event of the cluster at `at`, in seconds since 1970. `kind`: failover, joined or left. `what`: the partition
    or the host. `source`, `target`: the hosts before and after, empty for none."""

    number: int
    at: float
    kind: str
    what: str
    source: str = ""
    target: str = ""


class ClusterState:
    """The leaders, followers and events after all queries so far."""

    def __init__(self) -> None:
        self.leaders: dict[str, str] = {}
        """By partition, the node that leads it, or led it last."""
        self.followers: dict[str, list[str]] = {}
        """By partition, the nodes that follow it."""
        self.leaderless: dict[str, float] = {}
        """By partition without a leader: since when, by the monotonic clock."""
        self.events: deque[ClusterEvent] = deque(maxlen=EVENTS)
        self.version = 0
        """A number that increases with every change of leaders or followers."""
        self.names: dict[str, str] = {}
        """By node, for all nodes ever seen: its name for people."""
        self._members: frozenset[str] | None = None
        self._number = 0

    def took(self, look: ClusterView) -> set[str]:
        """Add the result of a query. Returns the streams whose partition is new or has another leader now."""
        self._took_members(look)
        leaders, followers = _roles(look)
        moved = set()
        for partition, node in leaders.items():
            before = self.leaders.get(partition)
            if before is not None and before != node:
                moved.add(stream_of(partition))
                self._tell(look, "failover", label_of(partition), before, node)
            elif before is None:
                moved.add(stream_of(partition))
        absent = self.leaders.keys() - leaders.keys()
        kept = {}
        for partition in absent:
            if self.leaders[partition] in look.stats:  # its leader answers without it: it was dropped
                continue
            since_s = self.leaderless.get(partition, look.at_s)
            if look.at_s - since_s < FORGET_S:
                kept[partition] = since_s
        known = leaders | {partition: self.leaders[partition] for partition in kept}
        if known != self.leaders or followers != self.followers or kept.keys() != self.leaderless.keys():
            self.version += 1
        self.leaders, self.followers, self.leaderless = known, followers, kept
        return moved

    def _took_members(self, look: ClusterView) -> None:
        members = look.members.get("members", {})
        for node, member in members.items():
            self.names[node] = clipped(member["address"].removeprefix("tcp://"))
        there = frozenset(members)
        before, self._members = self._members, there
        if before is None:
            return
        for node in sorted(before - there):
            self._tell(look, "left", self.names.get(node, node), node, "")
        for node in sorted(there - before):
            self._tell(look, "joined", self.names.get(node, node), "", node)
        while len(self.names) > 2 * len(there) + EVENTS:
            del self.names[next(iter(self.names))]

    def _tell(self, look: ClusterView, kind: str, what: str, source: str, target: str) -> None:
        self._number += 1
        names = self.names.get
        self.events.append(
            ClusterEvent(self._number, look.wall_s, kind, what, names(source, source), names(target, target))
        )

    def table(self) -> Mapping[str, list[tuple[str, str, list[str], bool]]]:
        """By stream: for each partition its number, its leader, its followers, and whether the leader leads it now."""
        found: dict[str, list[tuple[str, str, list[str], bool]]] = {}
        for partition in sorted(self.leaders):
            row = (
                number_of(partition),
                self.leaders[partition],
                self.followers.get(partition, []),
                partition not in self.leaderless,
            )
            found.setdefault(clipped(stream_of(partition)), []).append(row)
        return found


def _roles(look: ClusterView) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Leaders and followers, by partition. If two nodes have created the same partition of a stream, one is dropped
    soon. Until then, the one with the newer epoch is shown or, for equal epochs, with more followers."""
    leaders: dict[str, tuple[int, str]] = {}
    followers: dict[str, list[str]] = {}
    for node in sorted(look.stats):
        stats = look.stats[node]
        for partition, epoch in stats.leads.items():
            if len(leaders) < _PARTITIONS:
                leaders[partition] = max(leaders.get(partition, (-1, "")), (epoch, node))
        for partition in stats.follows:
            if len(followers) < _PARTITIONS:
                followers.setdefault(partition, []).append(node)
    chosen: dict[tuple[str, str], str] = {}
    for partition in sorted(leaders, key=lambda each: (leaders[each][0], len(followers.get(each, ())), each)):
        chosen[stream_of(partition), number_of(partition)] = partition
    return {partition: leaders[partition][1] for partition in chosen.values()}, followers


def stream_of(partition: str) -> str:
    """The stream or table of a partition's key."""
    return partition.rsplit("/", 2)[0]


def number_of(partition: str) -> str:
    """The number in a partition's key, as text."""
    return clipped(partition.rpartition("/")[2].partition("-")[0])


def label_of(partition: str) -> str:
    """The stream and the number of a partition, as text for people."""
    return f"{clipped(stream_of(partition))} {number_of(partition)}"
