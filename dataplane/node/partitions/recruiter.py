"""Recruits followers for the partitions led here, preferably on other hosts, and deletes replicas that no configuration
names.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

from dataplane.clock import monotonic
from dataplane.cluster.membership import Membership
from dataplane.errors import DataplaneError
from dataplane.node.partitions.channel import PartitionChannel
from dataplane.node.partitions.hosted import HostedReplica
from dataplane.node.partitions.record import is_durable, kind_of
from dataplane.replication.configuration import Configuration
from dataplane.replication.leader import choose
from dataplane.wire import partition_messages as m

if TYPE_CHECKING:
    from dataplane.node.partitions.replicas import Replicas

log = logging.getLogger(__name__)

_ASK_S = 2.0  # timeout of the request to create a replica
_FORGET_S = 60.0  # the time after which a replica that is in no configuration, and hears no leader, is deleted


class Recruiter:
    """The recruits of all partitions that are led here."""

    def __init__(self, replicas: Replicas, members: Membership, channel: PartitionChannel) -> None:
        self._replicas = replicas
        self._members = members
        self._channel = channel

    def look(self, now: float) -> None:
        """Recruit missing followers in the background. Delete replicas that no configuration names, after `_FORGET_S`
        without a message."""
        for hosted in self._replicas:
            if hosted.replica.serves(now):
                for node in self._candidates(hosted, now):
                    hosted.recruited[node] = now
                    self._replicas.background.spawn(self._recruit(hosted, node))
            elif self._unneeded(hosted) and now - hosted.heard_s > _FORGET_S:
                self._replicas.end(hosted, forget=True)

    def wanted(self, partition: str) -> int:
        """The wanted number of followers of a partition."""
        directory = self._replicas.directories.get(kind_of(partition))
        return 1 if directory is None else directory.followers(partition)

    def _unneeded(self, hosted: HostedReplica) -> bool:
        """Whether the last known configuration does not name the replica. If none is known, a durable replica counts as
        needed, and any other as unneeded."""
        configuration = hosted.configuration
        return not configuration.includes(hosted.me) and (configuration.epoch > 0 or not hosted.durable)

    def _candidates(self, hosted: HostedReplica, now: float) -> list[str]:
        """The nodes to ask for a replica: on other hosts than the present replicas, if there are any. A node is not
        asked twice within `lease_s` + `retry_s`."""
        configuration, wanted = hosted.configuration, self.wanted(hosted.partition)
        if len(configuration.followers) >= wanted:
            return []
        again_s = self._replicas.settings.lease_s + self._replicas.settings.retry_s
        hosted.recruited = {node: at for node, at in hosted.recruited.items() if now - at < again_s}
        hosted.refused = {node: at for node, at in hosted.refused.items() if now - at < again_s}
        taken = {replica[0] for replica in (configuration.leader, *configuration.followers)}
        free, apart = self._fit(hosted.partition, taken, hosted.refused)
        wanted -= sum(node in free for node in hosted.recruited)
        chosen = choose(hosted.partition, configuration, [(name, 0) for name in apart or free], wanted)
        return [name for name, _ in chosen if name not in hosted.recruited]

    def _fit(self, partition: str, taken: Collection[str], refused: Collection[str]) -> tuple[list[str], list[str]]:
        """The members that can host another replica, and those of them that are on other hosts than `taken`."""
        members, durable = self._members.current, is_durable(partition)
        hosts = {members[name].host for name in taken if name in members}
        free = [name for name in members if name not in taken and name not in refused]
        free = [name for name in free if members[name].keeps or not durable]
        return free, [name for name in free if members[name].host not in hosts]

    def others(self, partition: str, leader: str, wanted: int) -> list[str]:
        """Choose at most `wanted` followers of a new partition: nodes on other hosts than the leader, if there are
        any."""
        free, apart = self._fit(partition, (leader,), ())
        chosen = choose(partition, Configuration(0, (leader, 0)), [(name, 0) for name in apart or free], wanted)
        return [name for name, _ in chosen]

    async def ask(self, node: str, partition: str) -> int:
        """Make another node create a replica, if it has none. Returns the incarnation of the replica. Raises
        PeerUnavailable, and the errors of `Replicas.host` there."""
        incarnation: int = await self._channel.ask(node, lambda number: m.HostReplica(number, partition), _ASK_S)
        return incarnation

    async def nowhere(self, partition: str) -> bool:
        """Whether no node has a replica that could restore the partition's configuration at the coordinator. False if
        any node that may be alive has not answered."""
        if self._members.missing or self._replicas.incarnation(partition):
            return False
        others = [node for node in self._members.current if node != self._members.me]
        asks = [self._channel.ask(node, lambda number: m.FindReplica(number, partition), _ASK_S) for node in others]
        found = await asyncio.gather(*asks, return_exceptions=True)
        return not any(found)  # an error counts as a replica

    async def _recruit(self, hosted: HostedReplica, node: str) -> None:
        try:
            incarnation = await self.ask(node, hosted.partition)
        except DataplaneError as error:  # its disk may be full
            log.info("node %s cannot become a follower of %s: %s", node, hosted.partition, error)
            hosted.recruited.pop(node, None)
            hosted.refused[node] = monotonic()
            return
        if not hosted.closed:
            hosted.recruit((node, incarnation))
