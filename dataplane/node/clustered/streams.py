"""The streams of the cluster that are open on this node, and their partitions, by name and by token.

A stream's token is of its name and generation, a partition's of its key; clients and references to rows name them so.
Both are the same on every node, so a row's name never changes.

What always holds: a stream that was dropped is `Closed` for who opened it, also when there is another of its name.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from operator import eq

from dataplane.batch.field import Field
from dataplane.batch.ref import BatchRef
from dataplane.coordinator.base import Unavailable
from dataplane.errors import Closed, LimitExceeded, Misuse, OutcomeUnknown
from dataplane.node.partitions.directory import Directory
from dataplane.node.partitions.streams import decode_settings, encode_settings, mark
from dataplane.node.partitions.table import Table
from dataplane.stream.settings import Settings

MAX_STREAMS = 4096
"""Streams that are open on a node at a time."""

TOKEN_BYTES = 8

_LEARN_S = 1.0  # for which the coordinator is asked to note columns
_MAX_CAME = 256

log = logging.getLogger(__name__)


def token_of(name: str) -> bytes:
    """The token of a partition's key, or of NAME/GENERATION of a stream."""
    return hashlib.blake2b(name.encode(), digest_size=TOKEN_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition of a stream. `node`: whose producers' own it is, in hex. `mark`: see `stream.keys`."""

    number: int
    key: str
    token: bytes
    node: str
    mark: str


class Stream:
    """A stream of the cluster, by its name and generation."""

    def __init__(self, table: Table, directory: Directory, me: str) -> None:
        self.name = table.stream
        self.generation = table.generation
        self.token = token_of(f"{table.stream}/{table.generation}")
        self.settings = decode_settings(table.settings)
        self._directory = directory
        self._me = me
        self._seen: Table | None = None
        self._partitions: dict[int, Partition] = {}
        self._by_token: dict[bytes, Partition] = {}
        self._own: Partition | None = None
        self._came: dict[tuple[str, ...], tuple[Field, ...]] = {}  # columns that fit

    @property
    def dropped(self) -> bool:
        """Whether there is no such stream any more, as far as is known here."""
        table = self._directory.find(self.name)
        return table is None or table.generation != self.generation

    @property
    def table(self) -> Table:
        """Its placement as it is now. Raises Closed once it was dropped."""
        table = self._directory.find(self.name)
        if table is None or table.generation != self.generation:
            raise Closed("the stream was dropped")
        return table

    @property
    def partitions(self) -> list[Partition]:
        """All partitions, the one of this node's producers first. Raises Closed."""
        return list(self._named().values())

    @property
    def own(self) -> Partition | None:
        """The open partition of this node's producers, if there is one. Raises Closed."""
        self._named()
        return self._own

    async def fit(self, ref: BatchRef) -> None:
        """Have the columns of a reference in the stream's table, for all partitions. A coordinator that does not answer
        is not waited for: then each partition knows its own. Raises SchemaMismatch, Closed."""
        columns, fields = ref.columns, ref.schema
        known = self._came.get(columns)
        if known is not None and all(map(eq, known, fields.values())):
            return
        table = self.table
        if table.learning(fields) is not table:
            try:
                async with asyncio.timeout(_LEARN_S):
                    await self._directory.learn(table, fields)
            except (TimeoutError, Unavailable, OutcomeUnknown) as error:
                log.info("the columns of stream %r are not in its table yet: %s", self.name, error)
                return
        if len(self._came) >= _MAX_CAME:
            self._came.clear()
        self._came[columns] = tuple(fields.values())

    def partition(self, number: int) -> Partition:
        """The partition of this number. Raises Misuse where there is none, Closed."""
        found = self._named().get(number)
        if found is None:
            raise Misuse(f"stream {self.name!r} has no partition {number}")
        return found

    def with_token(self, token: bytes) -> Partition | None:
        """The partition of this token. Raises Closed."""
        self._named()
        return self._by_token.get(token)

    def keyed(self, key: str) -> Partition:
        """The partition of this key. Raises Closed where it is gone."""
        for partition in self._named().values():
            if partition.key == key:
                return partition
        raise Closed(f"stream {self.name!r} has no partition {key} any more")

    def _named(self) -> dict[int, Partition]:
        table = self.table
        if table is not self._seen:
            made = [self._of(table, each.number, each.node) for each in table.partitions]
            self._partitions = {each.number: each for each in sorted(made, key=lambda each: each.node != self._me)}
            self._by_token = {each.token: each for each in made}
            own = table.own(self._me)
            self._own = None if own is None else self._partitions[own]
            self._seen = table
        return self._partitions

    def _of(self, table: Table, number: int, node: str) -> Partition:
        known = self._partitions.get(number)
        key = table.key(number)
        if known is not None and known.key == key:
            return known
        return Partition(number, key, token_of(key), node, mark(table.generation, number))


class Streams:
    """All of one node. `me`: its name, in hex."""

    def __init__(self, directory: Directory, me: str) -> None:
        self._directory = directory
        self._me = me
        self._by_name: dict[str, Stream] = {}
        self._by_token: dict[bytes, Stream] = {}

    def __iter__(self) -> Iterator[Stream]:
        return iter([*self._by_name.values()])

    async def open(self, name: str, settings: Settings | None) -> Stream:
        """The stream of this name, made if there is none and settings are given. Raises Misuse where there is none, or
        one with other settings; LimitExceeded, Unavailable, OutcomeUnknown."""
        stream = self._by_name.get(name)
        if stream is None or stream.dropped:
            if len(self._by_name) >= MAX_STREAMS:
                self._forget_dropped()
            stream = self._enter(await self._opened(name, settings))
        if settings is not None and settings != stream.settings:
            raise Misuse(f"the stream {name!r} was made with {stream.settings}, and this asks for {settings}")
        return stream

    async def _opened(self, name: str, settings: Settings | None) -> Table:
        table = await self._directory.read(name)
        if table is not None or settings is None:
            return table or await self._directory.open(name, None)
        followers = max(1, settings.replicas - 1)
        try:
            encoded = encode_settings(settings)
            return await self._directory.open(name, encoded, followers=followers, durable=settings.durable)
        except Misuse:
            if self._directory.find(name) is None:
                raise
            # another has made it meanwhile
            return await self._directory.open(name, None)

    def _enter(self, table: Table) -> Stream:
        known = self._by_name.get(table.stream)
        if known is not None and known.generation == table.generation:
            return known
        if known is not None:
            self._by_token.pop(known.token, None)
        stream = Stream(table, self._directory, self._me)
        self._by_name[stream.name] = self._by_token[stream.token] = stream
        return stream

    def _forget_dropped(self) -> None:
        for stream in [stream for stream in self if stream.dropped]:
            del self._by_name[stream.name]
            self._by_token.pop(stream.token, None)
        if len(self._by_name) >= MAX_STREAMS:
            raise LimitExceeded("so many streams", what="streams", asked=MAX_STREAMS + 1, limit=MAX_STREAMS)

    def find(self, token: bytes) -> tuple[Stream, Partition | None]:
        """The stream of this token, or the partition of a stream. Raises Closed where none that is open has it."""
        stream = self._by_token.get(token)
        if stream is not None:
            return stream, None
        for stream in self:
            partition = None if stream.dropped else stream.with_token(token)
            if partition is not None:
                return stream, partition
        raise Closed("the stream was dropped, or the partition that had these rows is gone")

    async def partition(self, stream: Stream, token: bytes) -> Partition:
        """The partition of the stream that has this token; one that was added just now too. Raises Misuse where there
        is none, Closed, Unavailable."""
        for again in (False, True):
            if again:
                await self._directory.read(stream.name)
            partition = stream.with_token(token)
            if partition is not None:
                return partition
        raise Misuse(f"these rows were delivered by another stream than {stream.name!r}, or their partition is gone")

    def forget(self, table: Table) -> None:
        """The stream of this table was dropped."""
        stream = self._by_name.get(table.stream)
        if stream is not None and stream.generation == table.generation:
            del self._by_name[stream.name]
            self._by_token.pop(stream.token, None)

    def named(self, name: str) -> Stream | None:
        """The stream of this name, if it is open here."""
        return self._by_name.get(name)
