"""Creates the coordinator of a node, which depends on the settings, and the membership, and runs both."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dataplane.cluster.detector import Detector
from dataplane.cluster.membership import Member, Membership
from dataplane.config import ClusterConfig
from dataplane.coordinator.base import Coordinator
from dataplane.wire.auth import Key
from dataplane.wire.peer import Peers

if TYPE_CHECKING:
    from dataplane.cluster.seeds import Seeds


class ClusterConnection:
    """A node's connection to etcd, its membership, and the server of etcd if the node is a seed."""

    def __init__(self, config: ClusterConfig, peers: Peers, me: str, member: Member, key: Key | None) -> None:
        """`peers` must have been started. Raises OSError; ValueError if a package or program is not installed;
        Rejected if this node's directory belongs to another cluster."""
        how = config.joined
        self._seeds: Seeds | None = None
        self.coordinator: Coordinator
        if how.engine == "seeds":
            from dataplane.cluster.certificates import check_installed
            from dataplane.cluster.seeds import Seeds

            check_installed()
            assert key is not None, "the settings were checked"
            self._seeds = Seeds(config, key)
            self.coordinator = self._seeds.coordinator
        else:
            from dataplane.cluster.access import access  # imported late: few nodes need TLS and an HTTP client
            from dataplane.coordinator.etcd import EtcdCoordinator

            tls, login = access(config)
            self.coordinator = EtcdCoordinator(how.addresses, how.name, tls=tls, login=login)
        self.membership = Membership(self.coordinator, me, member, key=key)
        self.detector = Detector(peers, self.membership)

    async def run(self) -> None:
        """Be a member until cancelled, and then leave. Raises Rejected if this node is not admitted."""
        running = [asyncio.ensure_future(work) for work in (self.membership.run(), self.detector.run())]
        if self._seeds is not None:
            running.append(asyncio.ensure_future(self._seeds.run()))
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _ended(running[:2])
            await self.membership.leave()  # before this node's etcd server ends
            await _ended(running[2:])
        for task in running:
            if not task.cancelled():
                task.result()

    async def aclose(self) -> None:
        """Release everything, after `run` has ended. Idempotent."""
        await self.coordinator.aclose()
        if self._seeds is not None:
            await self._seeds.aclose()


async def _ended(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel these tasks and wait for them."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
