"""The streams of the cluster that are open on this node, by name and by token.

The token of a stream is derived from its name and generation, so it is the same on every node, and keys of rows never
change. A stream has one partition. If every replica has died, the next node that needs the stream creates another
partition. Its row and grant numbers begin far above those of the lost one.

Invariant: a dropped stream is `Closed` for clients that had it open, even if a new stream has its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import msgspec

from dataplane.errors import Closed, Corrupt, LimitExceeded
from dataplane.node.partitions.directory import Directory
from dataplane.node.partitions.record import Record
from dataplane.node.sessions.interface import MAX_STREAMS
from dataplane.stream import requests as r
from dataplane.stream.settings import StreamSettings
from dataplane.wire.row_messages import LostRowsTaken

TOKEN_BYTES = 8

_ROWS = 1 << 40  # the number of row numbers that are reserved for one partition

encode_settings = msgspec.msgpack.Encoder().encode
_settings = msgspec.msgpack.Decoder(StreamSettings)


def decode_settings(settings: bytes) -> StreamSettings:
    """The settings of a stream. Raises Corrupt if the bytes are not encoded settings."""
    try:
        return _settings.decode(settings)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"these are no settings of a stream: {error}") from error


def opening(record: Record) -> bytes:
    """The first request to the partition of a stream."""
    settings = decode_settings(record.settings)
    first = max(0, record.number) * _ROWS
    return r.encode_request(r.Open(settings=settings, mark=record.generation, first=first))


def token_of(name: str) -> bytes:
    """The token of the key of a partition, or of NAME/GENERATION of a stream."""
    return hashlib.blake2b(name.encode(), digest_size=TOKEN_BYTES).digest()


class ClusteredStream:
    """A stream of the cluster, by its name and generation."""

    def __init__(self, record: Record, directory: Directory) -> None:
        self.name = record.name
        self.generation = record.generation
        self.token = token_of(f"{record.name}/{record.generation}")
        self.settings = decode_settings(record.settings)
        self._directory = directory
        self.unreported: list[LostRowsTaken] = []
        """Reports of lost rows by the partition that no client has received."""

    @property
    def dropped(self) -> bool:
        """Whether the stream was dropped, according to this node's records."""
        record = self._directory.records.find(self.name)
        return record is None or record.generation != self.generation

    @property
    def record(self) -> Record:
        """The record as last seen here. Raises Closed if the stream was dropped."""
        record = self._directory.records.find(self.name)
        if record is None or record.generation != self.generation:
            raise Closed(f"the stream {self.name!r} was dropped")
        return record

    @property
    def partition(self) -> str | None:
        """The key of the stream's partition; None if the partition was lost and has not been replaced. Raises Closed if
        the stream was dropped."""
        return self.record.key


class OpenStreams:
    """The open streams of one node."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._by_name: dict[str, ClusteredStream] = {}
        self._by_token: dict[bytes, ClusteredStream] = {}

    def __iter__(self) -> Iterator[ClusteredStream]:
        return iter([*self._by_name.values()])

    async def open(self, name: str, settings: StreamSettings | None) -> ClusteredStream:
        """Return the stream with this name; create it if there is none and settings are given. Raises Misuse if there
        is none without settings, or if its settings differ; LimitExceeded, Unavailable, OutcomeUnknown,
        PeerUnavailable."""
        stream = self._by_name.get(name)
        if stream is None or stream.dropped:
            if len(self._by_name) >= MAX_STREAMS:
                self._forget_dropped()
            stream = self._enter(await self._opened(name, settings))
        if settings is not None:
            stream.settings.check_same(name, settings)
        return stream

    async def _opened(self, name: str, settings: StreamSettings | None) -> Record:
        if settings is None:
            return await self._directory.open(name, None)
        encoded, followers = encode_settings(settings), max(1, settings.replicas - 1)
        return await self._directory.open(name, encoded, followers=followers, durable=settings.durable)

    def _enter(self, record: Record) -> ClusteredStream:
        known = self._by_name.get(record.name)
        if known is not None and known.generation == record.generation:
            return known
        if known is not None:
            self._by_token.pop(known.token, None)
        stream = ClusteredStream(record, self._directory)
        self._by_name[stream.name] = self._by_token[stream.token] = stream
        return stream

    def _forget_dropped(self) -> None:
        for stream in [stream for stream in self if stream.dropped]:
            del self._by_name[stream.name]
            self._by_token.pop(stream.token, None)
        if len(self._by_name) >= MAX_STREAMS:
            raise LimitExceeded("so many streams", what="streams", asked=MAX_STREAMS + 1, limit=MAX_STREAMS)

    def find(self, token: bytes) -> ClusteredStream:
        """The open stream with this token. Raises Closed."""
        stream = self._by_token.get(token)
        if stream is None:
            raise Closed("the stream was dropped")
        return stream

    def named(self, token: bytes) -> ClusteredStream | None:
        """The open stream with this token that was not dropped, or None."""
        stream = self._by_token.get(token)
        return None if stream is None or stream.dropped else stream

    def forget(self, record: Record) -> None:
        """Forget the stream of this record, which was dropped."""
        stream = self._by_name.get(record.name)
        if stream is not None and stream.generation == record.generation:
            del self._by_name[stream.name]
            self._by_token.pop(stream.token, None)
