"""Which partitions a stream has, and which of them are open to new groups: a value of the coordinator, with a version.

A row with a group or key goes to the open partition of the highest rendezvous hash (`cluster.placement`); one without,
and a group that is appended whole, to the partition of its producer's own node. When a partition is added or closed the
table has a new version, and keeps the set of open partitions that was: a group or key of which the two say different
partitions is asked for at the older first, as long as the older may hold part of it. Then that set is retired.

What always holds: a partition's number is never used again; tables of one stream differ in their versions, and of two
streams of one name in their generations.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane.batch.field import Field
from dataplane.batch.schema import merge_fields
from dataplane.cluster.placement import Index, Placement
from dataplane.errors import Corrupt, Misuse

Flags = npt.NDArray[np.bool_]

STREAMS, TABLES = "s", "t"
"""What a partition is of: the first letter of its generation."""

MAX_OLDER = 16
"""Sets of open partitions that are kept; no other is made before the oldest is retired."""

MAX_KEYS = 64
"""Keys of a struct column up to which all partitions agree on each; with more, on its being a struct alone."""

DURABLE = ".durable"
"""What the names of durable partitions end with: a node that is asked to have a replica knows no more of it."""


def is_durable(partition: str) -> bool:
    """Whether the partition of this name outlives the processes of its nodes."""
    return partition.endswith(DURABLE)


class Partition(msgspec.Struct, frozen=True, array_like=True):
    """A partition, by its number. `node`: whose producers' own it is. Closed ones take no new groups."""

    number: int
    node: str
    open: bool = True


class LostPartition(msgspec.Struct, frozen=True, array_like=True):
    """A partition of which every replica has died: whose own it was, how many rows it had as far as others know (-1:
    they do not), and which nodes' producers had appended to it."""

    number: int
    node: str
    rows: int = -1
    producers: tuple[str, ...] = ()


class Table(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The placement table of one stream."""

    version: int
    stream: str
    generation: str
    settings: bytes
    followers: int
    partitions: tuple[Partition, ...] = ()
    older: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(version, open partitions) of earlier versions that may hold parts of groups which now belong elsewhere."""
    next: int = 0
    lost: tuple[LostPartition, ...] = ()
    """Those that nobody was told of yet."""
    closed: bool = False
    """Whether nothing is appended to the stream any more."""
    first: int = 0
    """How many partitions the stream was made with; their numbers are less."""
    durable: bool = False
    """Whether its partitions outlive the processes of their nodes."""
    totals: bytes = b""
    """What partitions had counted that were drained: see `directory.Requests.counted`."""
    reserved: tuple[Partition, ...] = ()
    """Those that are being made, one a node: their numbers are nobody else's."""
    schema: tuple[tuple[str, Field], ...] = ()
    """What all partitions agree on of the columns that any of them has: see `agreed`."""
    teller: str = ""
    """Who took what is told but once, so that of two equal changes one is one's own."""

    def key(self, number: int) -> str:
        """The name of a partition. Raises Misuse where there is none of that number.

        The node is part of it: of two that make a partition of one number at a time each makes its own, and the table
        names one of them."""
        partition = self.find(number)
        if partition is None:
            raise Misuse(f"stream {self.stream!r} has no partition {number}")
        return self.key_of(partition)

    def key_of(self, partition: Partition) -> str:
        """The name of a partition that is there or is being made."""
        suffix = DURABLE if self.durable else ""
        return f"{self.stream}/{self.generation}/{partition.number}-{partition.node}{suffix}"

    @cached_property
    def keys(self) -> frozenset[str]:
        """The names of the partitions."""
        return frozenset(map(self.key_of, self.partitions))

    @cached_property
    def _by_number(self) -> dict[int, Partition]:
        return {partition.number: partition for partition in self.partitions}

    @cached_property
    def _own(self) -> dict[str, int]:
        return {each.node: each.number for each in reversed(self.partitions) if each.open}

    def named(self, key: str) -> bool:
        """Whether the partition of this name is one of them."""
        return key in self.keys

    def find(self, number: int) -> Partition | None:
        return self._by_number.get(number)

    @cached_property
    def open(self) -> tuple[int, ...]:
        """The numbers of the partitions that are open."""
        return tuple(partition.number for partition in self.partitions if partition.open)

    def own(self, node: str) -> int | None:
        """The partition of this node's producers."""
        return self._own.get(node)

    def reserved_for(self, node: str) -> Partition | None:
        """The partition that is being made for this node."""
        return next((partition for partition in self.reserved if partition.node == node), None)

    @property
    def full(self) -> bool:
        """Whether no other set of open partitions can be had before the oldest is retired."""
        return len(self.older) >= MAX_OLDER

    # Later versions

    def extended(self, nodes: Sequence[str]) -> Table:
        """With an open partition for each of these nodes."""
        added = tuple(Partition(self.next + i, node) for i, node in enumerate(nodes))
        changed = msgspec.structs.replace(self, partitions=self.partitions + added, next=self.next + len(added))
        return self._then(changed)

    def reserving(self, node: str) -> Table:
        """With a number for a partition of this node that is to be made."""
        if self.reserved_for(node) is not None:
            return self
        reserved = (*self.reserved, Partition(self.next, node))
        return msgspec.structs.replace(self, version=self.version + 1, next=self.next + 1, reserved=reserved)

    def unreserved(self, partition: Partition) -> Table:
        """Without one that was being made."""
        if partition not in self.reserved:
            return self
        reserved = tuple(each for each in self.reserved if each != partition)
        return msgspec.structs.replace(self, version=self.version + 1, reserved=reserved)

    def opening(self, partition: Partition) -> Table:
        """With a partition open that was reserved and is made by now."""
        if partition not in self.reserved:
            return self
        partitions = (*self.partitions, partition)
        return self._then(msgspec.structs.replace(self.unreserved(partition), partitions=partitions))

    def shut(self) -> Table:
        """Of a stream to which nothing is appended any more."""
        return self if self.closed else msgspec.structs.replace(self, version=self.version + 1, closed=True)

    def draining(self, number: int, *, most_older: int = MAX_OLDER) -> Table:
        """With a partition that takes no new groups. Raises Misuse where more than so many older sets are needed."""
        partitions = tuple(
            msgspec.structs.replace(each, open=False) if each.number == number else each for each in self.partitions
        )
        return self._then(msgspec.structs.replace(self, partitions=partitions), most_older)

    def without(self, number: int, totals: bytes | None = None) -> Table:
        """Without a closed partition that is empty, and that no older set names alone. `totals`: with what it had
        counted."""
        if self.find(number) is None:
            return self
        partitions = tuple(each for each in self.partitions if each.number != number)
        older = tuple((version, tuple(n for n in numbers if n != number)) for version, numbers in self.older)
        kept = tuple((version, numbers) for version, numbers in older if numbers)
        counted = self.totals if totals is None else totals
        changed = msgspec.structs.replace(self, partitions=partitions, older=kept, totals=counted)
        return msgspec.structs.replace(changed, version=self.version + 1)

    def with_again(self, partition: Partition) -> Table:
        """With a partition that it had, closed to new groups."""
        if self.find(partition.number) is not None:
            return self
        there = (*self.partitions, msgspec.structs.replace(partition, open=False))
        return msgspec.structs.replace(self, version=self.version + 1, partitions=there)

    def losing(self, lost: LostPartition) -> Table:
        """Without a partition of which every replica has died."""
        if self.find(lost.number) is None:
            return self
        left = self.draining(lost.number, most_older=sys.maxsize).without(lost.number)
        return msgspec.structs.replace(left, lost=(*self.lost, lost))

    def told(self, lost: Sequence[LostPartition], teller: str) -> Table:
        """This teller, which no other is called, tells of these."""
        left = tuple(each for each in self.lost if each not in lost)
        if left == self.lost:
            return self
        return msgspec.structs.replace(self, version=self.version + 1, lost=left, teller=teller)

    def learning(self, fields: Mapping[str, Field]) -> Table:
        """With these columns. Raises SchemaMismatch for one that can not be the column of its name."""
        schema = dict(self.schema)
        for name, field in fields.items():
            found = agreed(field)
            known = schema.get(name)
            if known is None:
                schema[name] = found
            elif known != found:
                merged = agreed(merge_fields(name, [known, found]))
                schema[name] = merged if known.children or known.kind != "struct" else known
        learnt = tuple(schema.items())
        return self if learnt == self.schema else msgspec.structs.replace(self, version=self.version + 1, schema=learnt)

    def retired(self, version: int) -> Table:
        """Without the sets of open partitions up to this version."""
        older = tuple((each, numbers) for each, numbers in self.older if each > version)
        return msgspec.structs.replace(self, version=self.version + 1, older=older)

    def _then(self, changed: Table, most_older: int = MAX_OLDER) -> Table:
        older = self.older
        if self.open and self.open != changed.open:
            older = (*older, (self.version, self.open))
        if len(older) > most_older:
            raise Misuse(f"stream {self.stream!r} has {MAX_OLDER} versions of its placement that are still needed")
        return msgspec.structs.replace(changed, version=self.version + 1, older=older)

    # Placement

    def place(self, groups: Sequence[str | int]) -> Index:
        """The number of the partition of each of these groups or keys, as of this version."""
        return _placed(self.open, self.stream, groups)

    def moved(self, groups: Sequence[str | int], now: Index) -> list[tuple[int, Index, Index]]:
        """The groups that an older version has elsewhere, the oldest version first: (version, positions of the
        groups, numbers of the partitions)."""
        found = []
        for version, numbers in self.older:
            then = _placed(numbers, self.stream, groups)
            differ = np.flatnonzero(then != now)
            if len(differ):
                found.append((version, differ, then[differ]))
        return found


def agreed(field: Field) -> Field:
    """What can not differ between the rows of a column: not which dimensions vary, nor the keys of a large struct."""
    if field.kind == "ragged":
        return Field("ragged", field.dtype, (None,) * len(field.shape))
    if len(field.children) > MAX_KEYS:
        return Field("struct")
    return Field(field.kind, field.dtype, field.shape, tuple((key, agreed(child)) for key, child in field.children))


@lru_cache(maxsize=256)
def _placement(numbers: tuple[int, ...]) -> tuple[Placement, Index]:
    placement = Placement([str(number).encode() for number in numbers])
    return placement, np.array([int(node) for node in placement.nodes], np.int64)


def _placed(numbers: tuple[int, ...], stream: str, groups: Sequence[str | int]) -> Index:
    if not numbers:
        raise Misuse(f"stream {stream!r} has no open partition")
    placement, of = _placement(numbers)
    return of[placement.winners(stream, groups)]


def kind_of(partition: str) -> str:
    """Of which kind a partition of this key is; empty for what is no key."""
    parts = partition.rsplit("/", 2)
    return parts[1][:1] if len(parts) == 3 else ""


def name_of(partition: str) -> str:
    """The stream or table that a partition of this key is of."""
    return partition.rsplit("/", 2)[0]


def node_of(partition: str) -> str:
    """The node whose own a partition of this key was made as."""
    return partition.rsplit("/", 1)[-1].removesuffix(DURABLE).partition("-")[2]


def encode(table: Table) -> bytes:
    """The value that the coordinator keeps."""
    return msgspec.msgpack.encode(table)


_decoder = msgspec.msgpack.Decoder(Table)


def decode(value: bytes) -> Table:
    """Raises Corrupt for a value that no node wrote."""
    try:
        return _decoder.decode(value)
    except msgspec.MsgspecError as error:
        raise Corrupt(
            f"the coordinator's value is no placement table: {error}; it is left as it is. Take the key away, and who "
            "knows the table writes it again"
        ) from None
