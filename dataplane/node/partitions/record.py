"""The record of a stream or a table at the coordinator: its settings, and its partition.

Each stream or table has one partition. When every replica of it has died, another partition with a higher number
replaces it, so the key of a partition is never reused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from dataplane.errors import Corrupt

STREAMS, TABLES = "s", "t"
"""The kind of a partition: the first letter of its generation."""

EPOCHS = 1 << 18
"""The number of epochs that are reserved for one partition. The epochs of the stream's next partition are higher, so
that the numbers of grants stay unique."""

DURABLE = ".durable"
"""Suffix of the keys of durable partitions. A node that is asked to host a replica knows only the key."""


class LostPartition(msgspec.Struct, frozen=True, array_like=True):
    """A partition of which every replica has died. `rows`: each node (hex) that retained columns of its producers, and
    the number of their rows."""

    key: str
    rows: tuple[tuple[str, int], ...] = ()


class Record(msgspec.Struct, frozen=True, array_like=True):
    """The record of one stream or table. `generation` distinguishes the stream or table from others of the same
    name."""

    version: int
    name: str
    generation: str
    settings: bytes
    followers: int
    durable: bool = False
    number: int = -1
    """The number of the partition; -1 if there is none now."""
    maker: str = ""
    """The node that created the partition, in hex."""
    next: int = 0
    """The number of the next partition."""
    lost: tuple[LostPartition, ...] = ()
    """The lost partitions that were not reported yet."""
    teller: str = ""
    """A random token of the call that last took `lost` to report the partitions. By the token, the call recognises its
    own change."""

    @property
    def key(self) -> str | None:
        """The key of the partition; None if there is none now."""
        if self.number < 0:
            return None
        suffix = DURABLE if self.durable else ""
        return f"{self.name}/{self.generation}/{self.number}-{self.maker}{suffix}"

    def made_by(self, node: str) -> Record:
        """The record with a new partition, which the node with this id creates."""
        return msgspec.structs.replace(self, version=self.version + 1, number=self.next, maker=node, next=self.next + 1)

    def without(self, settings: bytes | None = None) -> Record:
        """The record without its partition, and with other settings if `settings` is given."""
        settings = self.settings if settings is None else settings
        return msgspec.structs.replace(self, version=self.version + 1, number=-1, maker="", settings=settings)

    def losing(self, rows: Sequence[tuple[str, int]]) -> Record:
        """The record without its partition, of which every replica has died."""
        lost = (*self.lost, LostPartition(self.key or "", tuple(rows)))
        return msgspec.structs.replace(self.without(), lost=lost)

    def told(self, teller: str) -> Record:
        """The record without its lost partitions. The call with the token `teller` reports them."""
        return msgspec.structs.replace(self, version=self.version + 1, lost=(), teller=teller)


def is_durable(partition: str) -> bool:
    """Whether the partition outlives the processes of its nodes."""
    return partition.endswith(DURABLE)


def kind_of(partition: str) -> str:
    """The kind of the partition with this key; empty for an invalid key."""
    return generation_of(partition)[:1]


def name_of(partition: str) -> str:
    """The name of the stream or table of the partition."""
    return partition.rsplit("/", 2)[0]


def generation_of(partition: str) -> str:
    """The generation of the stream or table of the partition; empty for an invalid key."""
    parts = partition.rsplit("/", 2)
    return parts[1] if len(parts) == 3 else ""


@lru_cache(maxsize=1024)
def owner_of(partition: str) -> str:
    """The stream or table of the partition, named as in `Store.holders`; empty for an invalid key."""
    kind = {STREAMS: "stream", TABLES: "table"}.get(kind_of(partition))
    return "" if kind is None else f"{kind} {name_of(partition)}"


def called(partition: str) -> str:
    """The stream or table of the partition, for messages of errors. An invalid key is returned as it is."""
    owner, _, name = owner_of(partition).partition(" ")
    return f"{owner} {name!r}" if owner else partition


def maker_of(partition: str) -> str:
    return partition.rsplit("/", 1)[-1].removesuffix(DURABLE).partition("-")[2]


encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Record)


def decode(value: bytes) -> Record:
    """The decoded record. Raises Corrupt."""
    try:
        return _decoder.decode(value)
    except msgspec.MsgspecError as error:
        raise Corrupt(
            f"the coordinator's value is no record of a stream or table: {error}; it is left as it is. Delete the key,"
            " and a node that knows the record writes it again"
        ) from None
