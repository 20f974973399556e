"""Which engine finds the others, as the settings say."""

from __future__ import annotations

from dataplane.cluster.membership import Member, Membership
from dataplane.cluster.static import StaticMembership
from dataplane.config import ClusterConfig
from dataplane.wire.auth import Key
from dataplane.wire.peer import Peers


def join(config: ClusterConfig, peers: Peers, me: Member, key: Key | None) -> Membership:
    """The membership of this node. Raises OSError; ValueError where what the engine needs is not installed."""
    how = config.joined
    if how.engine == "etcd":
        from dataplane.cluster.access import access  # with TLS and an HTTP client, which others do not need
        from dataplane.cluster.leases import LeaseMembership
        from dataplane.coordinator.etcd import EtcdCoordinator

        tls, login = access(config)
        coordinator = EtcdCoordinator(how.addresses, how.name, tls=tls, login=login)
        return LeaseMembership(coordinator, me, key, config.host)
    return StaticMembership(peers, me, how.addresses)
