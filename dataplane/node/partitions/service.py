"""All of it for one node: made, started, left and ended together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from dataplane.coordinator.base import Coordinator
from dataplane.node.partitions.background import Background
from dataplane.node.partitions.channel import Channel
from dataplane.node.partitions.columns import Columns, Settled
from dataplane.node.partitions.consuming import Consuming
from dataplane.node.partitions.directory import Directory, Requests
from dataplane.node.partitions.members import LEASE_S, LOST_S, Member, Members
from dataplane.node.partitions.replicas import SETTINGS, Logs, Machines, Replicas, in_memory
from dataplane.node.partitions.router import Router
from dataplane.replication.settings import Settings
from dataplane.wire.partition_messages import Frame
from dataplane.wire.peer import Peers


class Partitions:
    """The partitions of one node, whose control channel is `peers`: it hands frames to `receive`. The coordinator and
    the sockets are their maker's to close."""

    def __init__(
        self,
        me: str,
        member: Member,
        coordinator: Coordinator,
        peers: Peers,
        machines: Machines,
        requests: Requests,
        *,
        settled: Settled = lambda partition, entries: None,
        give_back: Callable[[str, bytes], Awaitable[object]],
        settings: Settings = SETTINGS,
        logs: Logs = in_memory,
        lease_s: float = LEASE_S,
        lost_s: float = LOST_S,
    ) -> None:
        self.members = Members(coordinator, me, member, lease_s=lease_s, lost_s=lost_s)
        self.channel = Channel(peers, self.members, member.life)
        self.replicas = Replicas(me, self.members, self.channel, coordinator, machines, settings=settings, logs=logs)
        self.router = Router(self.replicas, self.members, self.channel, coordinator)
        self.directory = Directory(coordinator, self.members, self.replicas, self.router, requests)
        self.consuming = Consuming(self.members, self.replicas, self.router, give_back)
        self.columns = Columns(self.members, self.replicas, self.channel, settled)
        self._background = Background()

    def receive(self, frame: Frame) -> None:
        """A frame of another node has come."""
        self.channel.receive(frame)

    async def start(self, timeout_s: float) -> None:
        """Be a member. Raises TimeoutError where the coordinator does not answer."""
        for work in (self.members.run, self.directory.run, self.columns.run):
            self._background.spawn(work())
        async with asyncio.timeout(timeout_s):
            await self.members.joined()

    async def leave(self, timeout_s: float) -> None:
        """Pass on what this node leads, and be no member any more; what is not done in time, others do."""
        await self.directory.leave(timeout_s)
        await self.members.leave()

    async def aclose(self) -> None:
        """End, without a word to others. Idempotent."""
        await self._background.aclose()
        await self.consuming.aclose()
        await self.columns.aclose()
        await self.directory.aclose()
        await self.replicas.aclose()
        await self.channel.aclose()
