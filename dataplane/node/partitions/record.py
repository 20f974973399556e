"""What the coordinator keeps of a stream or a table: its settings, and which partition has its rows.

A stream has one partition, and a table has one. Its number goes up when another takes its place, after every replica of
the one before has died: so the key of a partition is never used again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dataplane.errors import Corrupt

STREAMS, TABLES = "s", "t"
"""What a partition is of: the first letter of its generation."""

EPOCHS = 1 << 18
"""Of one partition: the next partition of a stream begins above them, so that its grants are no other's."""

DURABLE = ".durable"
"""What the keys of durable partitions end with: a node that is asked to have a replica knows no more of it."""


class LostPartition(msgspec.Struct, frozen=True, array_like=True):
    """A partition of which every replica has died. `rows`: by producers' node, in hex, how many it retained."""

    key: str
    rows: tuple[tuple[str, int], ...] = ()


class Record(msgspec.Struct, frozen=True, array_like=True):
    """The record of one stream or table. `generation` tells it from others that have had its name."""

    version: int
    name: str
    generation: str
    settings: bytes
    followers: int
    durable: bool = False
    number: int = -1
    """Of the partition; -1 where there is none now."""
    maker: str = ""
    """The node that made it, in hex."""
    next: int = 0
    """The number of the next partition."""
    lost: tuple[LostPartition, ...] = ()
    """Those that nobody was told of yet."""
    teller: str = ""
    """Who took what is told but once, so that of two equal changes one is one's own."""

    @property
    def key(self) -> str | None:
        """The key of the partition; None where there is none now."""
        if self.number < 0:
            return None
        suffix = DURABLE if self.durable else ""
        return f"{self.name}/{self.generation}/{self.number}-{self.maker}{suffix}"

    def made_by(self, node: str) -> Record:
        """With a new partition, which this node makes."""
        return msgspec.structs.replace(self, version=self.version + 1, number=self.next, maker=node, next=self.next + 1)

    def without(self, settings: bytes | None = None) -> Record:
        """Without its partition; with other settings, if some are given."""
        settings = self.settings if settings is None else settings
        return msgspec.structs.replace(self, version=self.version + 1, number=-1, maker="", settings=settings)

    def losing(self, rows: Sequence[tuple[str, int]]) -> Record:
        """Without its partition, of which every replica has died."""
        lost = (*self.lost, LostPartition(self.key or "", tuple(rows)))
        return msgspec.structs.replace(self.without(), lost=lost)

    def told(self, lost: Sequence[LostPartition], teller: str) -> Record:
        """This teller, which no other is called, tells of these."""
        left = tuple(each for each in self.lost if each not in lost)
        if left == self.lost:
            return self
        return msgspec.structs.replace(self, version=self.version + 1, lost=left, teller=teller)


def is_durable(partition: str) -> bool:
    """Whether the partition of this key outlives the processes of its nodes."""
    return partition.endswith(DURABLE)


def kind_of(partition: str) -> str:
    """Of which kind a partition of this key is; empty for what is no key."""
    parts = partition.rsplit("/", 2)
    return parts[1][:1] if len(parts) == 3 else ""


def name_of(partition: str) -> str:
    """The name of the stream or table that a partition of this key is of."""
    return partition.rsplit("/", 2)[0]


def maker_of(partition: str) -> str:
    """The node that made the partition of this key."""
    return partition.rsplit("/", 1)[-1].removesuffix(DURABLE).partition("-")[2]


encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Record)


def decode(value: bytes) -> Record:
    """Raises Corrupt for a value that no node wrote."""
    try:
        return _decoder.decode(value)
    except msgspec.MsgspecError as error:
        raise Corrupt(
            f"the coordinator's value is no record of a stream or table: {error}; it is left as it is. Take the key"
            " away, and who knows the record writes it again"
        ) from None
