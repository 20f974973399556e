"""Who replicates a partition, as the coordinator has it (PacificA, section 2.2).

A configuration changes by compare-and-set at the coordinator and in no other way, and each change adds one to the
epoch. So an epoch has one configuration for ever, one leader at most, and whoever has seen a configuration may tell
others of it: it needs no proof. For the same reason the compare-and-set can compare the value itself; no value comes
back.

A replica is one life of one log: a node that has lost its log comes back under another incarnation, so as another
replica, and nothing that the configuration says of the first is true of the second.
"""

from __future__ import annotations

import msgspec

from dataplane.errors import Corrupt

ReplicaId = tuple[str, int]
"""(node, incarnation of the log that the node keeps)."""

GENERATION = 1 << 16
"""Epochs between two coordinators of which the second knows nothing of the first: more than one ever made."""


class Configuration(msgspec.Struct, frozen=True, array_like=True):
    """The leader and the in-sync followers of a partition in one epoch (from 1)."""

    epoch: int
    leader: ReplicaId
    followers: tuple[ReplicaId, ...] = ()

    def holds(self, replica: ReplicaId) -> bool:
        """Whether the replica has, for sure, every command that was committed by this epoch."""
        return replica == self.leader or replica in self.followers

    def restarted(self) -> Configuration:
        """The next epoch with the same replicas: a leader that starts again has forgotten what it proposed in this."""
        return Configuration(self.epoch + 1, self.leader, self.followers)

    def without(self, replicas: frozenset[ReplicaId]) -> Configuration:
        """The next epoch, in which followers that do not answer are none."""
        return Configuration(self.epoch + 1, self.leader, tuple(f for f in self.followers if f not in replicas))

    def joined_by(self, replica: ReplicaId) -> Configuration:
        """The next epoch, in which a recruit is an in-sync follower."""
        return Configuration(self.epoch + 1, self.leader, (*self.followers, replica))

    def deposed_by(self, follower: ReplicaId) -> Configuration:
        """The next epoch, led by a follower, without the leader that it has not heard from (section 2.4)."""
        return Configuration(self.epoch + 1, follower, tuple(f for f in self.followers if f != follower))

    def restored_by(self, replica: ReplicaId) -> Configuration:
        """What the leader, or a follower whose leader has ended, tells a coordinator that has forgotten the partition:
        that it leads. The epoch is of the next generation, so it is none that others know of those forgotten."""
        epoch = (self.epoch // GENERATION + 1) * GENERATION
        return Configuration(epoch, replica, tuple(f for f in self.followers if f != replica))


def encode(configuration: Configuration) -> bytes:
    """The value that the coordinator keeps. Equal configurations have equal values."""
    return msgspec.msgpack.encode(configuration)


_decoder = msgspec.msgpack.Decoder(Configuration)


def decode(value: bytes) -> Configuration:
    """Raises Corrupt for a value that no replica wrote."""
    try:
        return _decoder.decode(value)
    except msgspec.MsgspecError as error:
        raise Corrupt(
            f"the coordinator's value for a partition is no configuration: {error}; it is left as it is. Take the key "
            "away, and who leads the partition writes it again"
        ) from None
