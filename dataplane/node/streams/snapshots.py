"""Snapshots of streams that one client reads, and streams that it restores from such.

What always holds: what a snapshot's columns need stays until it is released or its client goes; a stream that is being
restored is opened by nobody, and goes with its client unless it was finished.
"""

from __future__ import annotations

import itertools

from dataplane.batch.ref import BatchRef
from dataplane.errors import Misuse
from dataplane.node.streams import packed
from dataplane.node.streams.homes import Homes, Stream
from dataplane.stream.page import PAGE
from dataplane.stream.snapshot import Snapshot, begin, finish, put_back, put_columns
from dataplane.wire import messages as m

MAX_SNAPSHOTS = 4
"""Snapshots of one client at a time: each is a copy of a stream's books."""


class Snapshots:
    """Those of one client."""

    def __init__(self, homes: Homes) -> None:
        self._homes = homes
        self._taken: dict[int, Snapshot] = {}
        self._numbers = itertools.count(1)
        self._restoring: dict[bytes, Stream] = {}

    def take(self, request: m.TakeSnapshot, stream: Stream) -> m.SnapshotTaken:
        """The stream as it is now. Raises LimitExceeded."""
        packed.bound("snapshots of a client at a time", MAX_SNAPSHOTS, len(self._taken) + 1)
        snapshot = Snapshot(stream.home, stream.clock())
        for ref in snapshot.refs:
            self._homes.keep_too(ref)
        number = next(self._numbers)
        self._taken[number] = snapshot
        return m.SnapshotTaken(request.id, number, snapshot.head)

    def read(self, request: m.ReadSnapshot) -> m.SnapshotRows:
        """Some of its rows. Raises Misuse."""
        snapshot = self._taken.get(request.snapshot)
        if snapshot is None or request.first < 0 or not 1 <= request.count <= PAGE:
            raise Misuse(f"no rows {request.first} and {request.count} more of a snapshot {request.snapshot}")
        block = snapshot.block(request.first, request.count)
        columns = snapshot.columns(request.first, request.count)
        encoded = [(rows.tobytes(), task, ref.encode()) for rows, task, ref in columns]
        return m.SnapshotRows(request.id, block, encoded)

    def release(self, number: int) -> None:
        """Nobody reads the snapshot any more."""
        snapshot = self._taken.pop(number, None)
        for ref in snapshot.refs if snapshot is not None else ():
            self._homes.forget(ref)

    def begin(self, request: m.Restore) -> m.Opened:
        """A stream to be restored. Raises Misuse where its name is taken, Corrupt, LimitExceeded."""
        self._homes.check_free(request.name)
        stream = self._homes.unnamed(request.name, request.head.settings, request.head.mark)
        self._restoring[stream.token] = stream
        try:
            begin(stream.home, request.head)
        except BaseException:
            self.drop(stream)
            raise
        return m.Opened(request.id, stream.token, stream.home.settings, stream.home.books.keys.mark)

    def put_back(self, request: m.PutBack, stream: Stream) -> None:
        """Rows of it. Raises Misuse, Corrupt, LimitExceeded."""
        self._check(stream)
        put_back(stream.home, request.block, stream.clock())

    def put_columns(self, request: m.PutColumns, stream: Stream) -> BatchRef:
        """Columns of such, and what they are. Raises Misuse, SchemaMismatch, LimitExceeded, Lost."""
        self._check(stream)
        ref = BatchRef.decode(request.ref)
        self._homes.keep(ref)
        try:
            lengths = packed.lengths(request.lengths, ref)
            put_columns(stream.home, packed.int64("rows", request.rows), request.task, ref, lengths)
        except BaseException:
            self._homes.forget(ref)
            raise
        return ref

    def finish(self, stream: Stream) -> None:
        """From now on it is a stream like others. Raises Misuse where its name was taken meanwhile."""
        self._check(stream)
        self._homes.named(stream)
        finish(stream.home)
        del self._restoring[stream.token]

    def restoring(self, token: bytes) -> bool:
        """Whether this client restores a stream of this token."""
        return token in self._restoring

    def _check(self, stream: Stream) -> None:
        if stream.token not in self._restoring:
            raise Misuse(f"the stream {stream.name!r} is not being restored by this client")

    def leave(self) -> None:
        """The client has gone."""
        for number in list(self._taken):
            self.release(number)
        for stream in list(self._restoring.values()):
            self.drop(stream)

    def drop(self, stream: Stream) -> None:
        """Free all of a stream, be it restored or any other."""
        self._restoring.pop(stream.token, None)
        self._homes.drop(stream)
