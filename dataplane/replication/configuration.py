"""The replicas of a partition, as the coordinator stores them (PacificA, section 2.2).

A configuration changes only by compare-and-set at the coordinator, and each change increments the epoch. So an epoch
has exactly one configuration and at most one leader, and a replica may trust a configuration that another replica sends
it. For the same reason the compare-and-set can compare the value itself: no value ever recurs.

A replica is identified by its node and the incarnation of its log. A node that has lost its log returns with another
incarnation, as another replica. A configuration that names the former replica does not include the new one.
"""

from __future__ import annotations

import msgspec

from dataplane.errors import Corrupt

ReplicaId = tuple[str, int]
"""(node, incarnation of the node's log)."""

GENERATION = 1 << 16
"""Epochs per generation. A partition whose configuration the coordinator has lost continues in the next generation. No
partition is expected to use up the epochs of one generation."""


class Configuration(msgspec.Struct, frozen=True, array_like=True):
    """The leader and the in-sync followers of a partition in one epoch (from 1)."""

    epoch: int
    leader: ReplicaId
    followers: tuple[ReplicaId, ...] = ()

    def includes(self, replica: ReplicaId) -> bool:
        """Whether the replica is the leader or an in-sync follower, and so has every command committed in this
        epoch."""
        return replica == self.leader or replica in self.followers

    def restarted(self) -> Configuration:
        """The next epoch with the same replicas: a restarted leader has forgotten its proposals in this one."""
        return Configuration(self.epoch + 1, self.leader, self.followers)

    def without(self, replicas: frozenset[ReplicaId]) -> Configuration:
        """The next epoch, without these silent followers."""
        return Configuration(self.epoch + 1, self.leader, tuple(f for f in self.followers if f not in replicas))

    def joined_by(self, replica: ReplicaId) -> Configuration:
        """The next epoch, in which a recruit is an in-sync follower."""
        return Configuration(self.epoch + 1, self.leader, (*self.followers, replica))

    def deposed_by(self, follower: ReplicaId) -> Configuration:
        """The next epoch, led by a follower, without the silent leader (section 2.4)."""
        return Configuration(self.epoch + 1, follower, tuple(f for f in self.followers if f != follower))

    def restored(self) -> Configuration:
        """The same replicas in the first epoch of the next generation, which differs from every lost epoch. The leader
        writes this to a coordinator that has lost the partition."""
        return Configuration((self.epoch // GENERATION + 1) * GENERATION, self.leader, self.followers)


def encode(configuration: Configuration) -> bytes:
    """The value that the coordinator stores. Equal configurations have equal values."""
    return msgspec.msgpack.encode(configuration)


_decoder = msgspec.msgpack.Decoder(Configuration)


def decode(value: bytes) -> Configuration:
    """The decoded configuration. Raises Corrupt for an invalid value."""
    try:
        return _decoder.decode(value)
    except msgspec.MsgspecError as error:
        raise Corrupt(
            f"the coordinator's value for a partition is no configuration: {error}; it is left as it is. Delete the "
            "key, and the leader of the partition writes it again"
        ) from None
