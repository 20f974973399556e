"""Which engine finds the others, as the settings say."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dataplane.cluster.membership import Member, Membership
from dataplane.cluster.static import StaticMembership
from dataplane.config import ClusterConfig
from dataplane.wire.auth import Key
from dataplane.wire.peer import Peers

if TYPE_CHECKING:
    from dataplane.cluster.seeds import Seeds


class Cluster:
    """This node's membership, and the etcd that it runs if it is a seed."""

    def __init__(self, membership: Membership, seeds: Seeds | None = None) -> None:
        self.membership = membership
        self._seeds = seeds

    async def run(self) -> None:
        """Keep watch over the others until cancelled. Raises Rejected where this node may not be one of them."""
        if self._seeds is None:
            await self.membership.run()
            return
        running = asyncio.ensure_future(self._seeds.run())
        watching = asyncio.ensure_future(self.membership.run())
        try:
            await asyncio.wait((running, watching), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (watching, running):  # it leaves while there is an etcd to be told so
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        for task in (running, watching):
            if not task.cancelled():
                task.result()

    async def aclose(self) -> None:
        """Let go of all, once it runs no more. Idempotent."""
        await self.membership.aclose()
        if self._seeds is not None:
            await self._seeds.aclose()


def join(config: ClusterConfig, peers: Peers, me: Member, key: Key | None) -> Cluster:
    """The cluster, for this node. Raises OSError; ValueError where what the engine needs is not installed; Rejected
    where this node's directory is another cluster's."""
    how = config.joined
    if how.engine == "static":
        return Cluster(StaticMembership(peers, me, how.addresses))
    from dataplane.cluster.leases import LeaseMembership
    from dataplane.coordinator.gateway import check_installed

    check_installed()
    if how.engine == "seeds":
        from dataplane.cluster import certificates
        from dataplane.cluster.seeds import Seeds

        certificates.check_installed()
        assert key is not None, "the settings were checked"
        seeds = Seeds(config, key)
        return Cluster(LeaseMembership(seeds.coordinator, me, key, config.host), seeds)
    from dataplane.cluster.access import access  # with TLS and an HTTP client, which others do not need
    from dataplane.coordinator.etcd import EtcdCoordinator

    tls, login = access(config)
    coordinator = EtcdCoordinator(how.addresses, how.name, tls=tls, login=login)
    return Cluster(LeaseMembership(coordinator, me, key, config.host))
