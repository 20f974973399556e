"""Which engine finds the others, as the settings say."""

from __future__ import annotations

from dataplane.cluster.membership import Member, Membership
from dataplane.cluster.static import StaticMembership
from dataplane.config import Join
from dataplane.wire.peer import Peers


def join(how: Join, peers: Peers, me: Member) -> Membership:
    """The membership of this node. Raises ValueError where what the engine needs is not installed."""
    if how.engine == "etcd":
        from dataplane.cluster.etcd import EtcdMembership  # with an HTTP client, which others do not need

        return EtcdMembership(peers, me, how.addresses, how.name)
    return StaticMembership(peers, me, how.addresses)
