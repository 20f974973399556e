"""Streams that one client restores from a checkpoint: a partition is filled, and gets its name once it is complete.

The partition is replicated from its first row like any other. The record of the stream is written last, so nobody can
open the stream before.

Invariant: a stream without a name is dropped when its client goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.errors import Misuse, ProtocolMismatch
from dataplane.node.streams import request_checks
from dataplane.node.streams.sessions import Restored, Service, Session, happened
from dataplane.stream import requests as r
from dataplane.stream.block import Block
from dataplane.wire import messages as m

T = TypeVar("T")

_BLOCK_BYTES = 2 << 20  # of a block, so that it fits a command


class Restores:
    """The streams that one client restores."""

    def __init__(self, session: Session, service: Service) -> None:
        self._session = session
        self._service = service
        self._streams: dict[bytes, Restored] = {}

    def __contains__(self, token: bytes) -> bool:
        """Whether the client is restoring a stream with this token."""
        return token in self._streams

    async def begin(self, request: m.Restore) -> m.Opened:
        """Begin a stream. Raises Misuse if its name is taken, Corrupt, LimitExceeded, PeerUnavailable,
        OutcomeUnknown."""
        head = request.head
        restored = await self._service.prepare(request.name, head.settings, head.mark)
        token = restored.token
        self._streams[token] = restored
        try:
            await self._session.ask(restored.partition, r.Restore(head=head), r.Done)
        except BaseException:
            self.drop(token)
            raise
        return m.Opened(request.id, token, head.settings, restored.generation)

    async def put_back(self, request: m.PutBack) -> m.Done:
        """Restore rows. Raises Misuse, Corrupt, LimitExceeded, OutcomeUnknown."""
        partition = self._find(request.stream).partition
        for block in _fitting(request.block):
            await self._session.ask(partition, r.PutBack(block=block), r.Done)
        return m.Done(request.id)

    async def put_columns(self, request: m.PutColumns) -> BatchRef:
        """Restore columns of such rows; a reference to them. Raises Misuse, SchemaMismatch, LimitExceeded, Lost,
        OutcomeUnknown."""
        partition, ref = self._find(request.stream).partition, BatchRef.decode(request.ref)
        asked = r.PutColumns(
            rows=request_checks.int64("rows", request.rows),
            ref=ref,
            task=request.task,
            lengths=request_checks.lengths(request.lengths, ref),
        )
        claim = await self._service.claim(partition, ref)
        await self._session.ask(partition, asked, r.Done, settled=partial(happened, (claim,)))
        return ref

    async def finish(self, request: m.Restored) -> m.Done:
        """Publish the stream. Raises Misuse if its name was taken meanwhile, PeerUnavailable, OutcomeUnknown."""
        restored = self._find(request.stream)
        await self._session.ask(restored.partition, r.FinishRestore(), r.Done)
        await self._service.publish(restored)
        del self._streams[request.stream]
        return m.Done(request.id)

    def drop(self, token: bytes) -> None:
        """Give up the restoration."""
        restored = self._streams.pop(token)
        self._session.run_soon(lambda: self._service.discard(restored))

    def leave(self) -> None:
        """The client has gone."""
        for token in list(self._streams):
            self.drop(token)

    def _find(self, token: bytes) -> Restored:
        restored = self._streams.get(token)
        if restored is None:
            raise Misuse("no stream of this token is being restored by this client")
        return restored


def _fitting(block: Block) -> list[Block]:
    """The rows of a block in as many blocks as needed for each to fit into a command. Raises ProtocolMismatch."""
    count = len(block.keys)
    if count < 2 or len(msgspec.msgpack.encode(block)) <= _BLOCK_BYTES:
        return [block]
    half = count // 2
    return [*_fitting(_some(block, 0, half)), *_fitting(_some(block, half, count))]


def _some(block: Block, first: int, last: int) -> Block:
    """The rows of a block between two positions."""
    count = len(block.keys)

    def arrays(what: str, values: bytes, width: int) -> bytes:
        if len(values) % (count * width):
            raise ProtocolMismatch(f"a block of {count} rows and {len(values)} bytes of {what}")
        return np.frombuffer(values, np.uint8).reshape(-1, count, width)[:, first:last].tobytes()

    def listed(what: str, values: Sequence[T]) -> list[T]:
        return list(request_checks.exactly(f"{what} of a block", values, count)[first:last])

    rows = arrays("rows", block.rows, 8)
    there = set(np.frombuffer(rows, "<i8").tolist())
    groups = listed("groups", block.groups)
    named = set(groups)
    return Block(
        rows=rows,
        groups=groups,
        versions=arrays("versions", block.versions, 8),
        ages_s=arrays("ages", block.ages_s, 8),
        tags={name: listed("tags", values) for name, values in block.tags.items()},
        keys=listed("keys", block.keys),
        calls=[call for call in block.calls if call[1] in there],
        states=arrays("states", block.states, 1),
        tries=arrays("tries", block.tries, 1),
        dropped=[each for each in block.dropped if each[0] in named],
    )
