"""The times and sizes of a partition's replication, validated once."""

from __future__ import annotations

import msgspec


class ReplicationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a partition. Each replica measures times by its own clock. Raises ValueError for values that
    would let two leaders answer at once, or that are out of range."""

    lease_s: float = 3.0
    """A leader answers while each follower has acknowledged a message that was sent within this time."""
    grace_s: float = 4.0
    """A follower replaces its leader only after the leader was silent for this time or has ended. A new leader answers
    only after the same is true of all earlier leaders."""
    drift: float = 0.01
    """The largest deviation of a clock's second from a true second, as a fraction."""
    beat_s: float = 0.5
    """The longest interval between messages to each peer. If there is nothing else to send, a heartbeat is sent."""
    retry_s: float = 1.0
    """Time after which an unacknowledged batch, or a request to the coordinator, is repeated."""
    max_batch: int = 512
    """The most commands in one message."""
    max_bytes: int = 1 << 20
    """The most bytes of commands in one message, unless the first command is larger, and of one part of a snapshot."""
    max_command: int = 3 << 20
    """The most bytes of one command; a larger one is refused. A command must fit into a message between nodes."""
    snapshot_every: int = 4096
    """The least number of committed commands that a snapshot replaces. They must have as many bytes as the last one."""
    durable: bool = False
    """Whether a replica acknowledges and commits commands only once they are on its disk (`log.Operation`)."""

    def __post_init__(self) -> None:
        if not 0 <= self.drift < 1:
            raise ValueError(f"drift is {self.drift}; it is a fraction of a second a second, below 1")
        if not 0 < self.beat_s < self.lease_s:
            raise ValueError(f"beat_s is {self.beat_s}; it has to be less than lease_s, {self.lease_s}")
        if self.grace_s * (1 - self.drift) <= self.lease_s * (1 + self.drift):
            raise ValueError(
                f"grace_s is {self.grace_s}; with clocks that drift by {self.drift} it has to be more than "
                f"{self.lease_s * (1 + self.drift) / (1 - self.drift):.3f}, or two leaders could answer at once"
            )
        if self.retry_s <= 0 or min(self.max_batch, self.snapshot_every, self.max_bytes, self.max_command) < 1:
            raise ValueError("retry_s, max_batch, max_bytes, max_command and snapshot_every have to be more than 0")
