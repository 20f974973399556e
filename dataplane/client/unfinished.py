"""Unfinished rows, as a process uses them: begun, appended to piece by piece, and finished or abandoned.

The pieces stay where they were made, also on different hosts, and are read as one row once it is finished. A ragged
column that varies in its first dimension is the concatenation of the pieces; any other column is that of the last piece
that has it. A second piece of a dense array is refused, and so is any dense piece of the column whose tokens are
counted. The policy version of each token is in a column of the finished row, `version_spans`: int64 `[spans, 3]`,
for each span the first token, the one after its last, and the version; neighbours differ in version.

Invariants: a row has one holder, with a token; another process that resumes it gets another token, and pieces with
the first are then refused. A piece counts once, even if its append is repeated because its answer was lost.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dataplane.batch.batch import Batch
from dataplane.batch.ref import BatchRef
from dataplane.client import arguments
from dataplane.errors import DataplaneError, LeaseExpired, LimitExceeded, Misuse
from dataplane.stream import requests as r
from dataplane.stream.pieces import SPANS, Listed, RowPiece, stale_version

if TYPE_CHECKING:
    from dataplane.client.streams import AsyncStream

LEASE_S = 600.0
"""Seconds without a piece or a renewal after which a holder loses its row. A process that ends loses it at once."""

_MOST_UNFINISHED = 4096


@dataclass(frozen=True, slots=True)
class RowToken:
    """The data needed to continue an unfinished row, except its columns, which `stream.resume(key)` gives."""

    key: str
    group: str | int | None
    version: int
    """The policy version under which it was begun; `AsyncRow.version` is that of the last piece."""
    tags: dict[str, Any]
    pieces: int
    """The number of its pieces."""
    spans: list[tuple[int, int]]
    """For each policy version, in order, `(version, tokens)`: the version and its number of tokens. The column
    `version_spans` of the finished row has `[start, stop, version]` instead."""
    tokens: int
    """The number of its tokens."""
    age_s: float
    """Seconds since it was begun."""
    free: bool
    """Whether no process holds it, so that `resume` can take it over."""

    @classmethod
    def of(cls, row: Listed) -> RowToken:
        """The row as its leader lists it."""
        tokens = sum(count for _, count in row.spans)
        return cls(row.key, row.group, row.version, row.tags, row.pieces, row.spans, tokens, row.age_s, row.free)


class AsyncRow:
    """An unfinished row that this process holds. Made by `stream.begin` and `stream.resume`. As a context manager it
    is finished when the block is left, and released for others when it is left by an exception."""

    def __init__(self, stream: AsyncStream, listed: Listed, token: int, lease_s: float) -> None:
        self.key = listed.key
        self.group = listed.group
        self.version = listed.spans[-1][0] if listed.spans else listed.version
        """The policy version of the last piece, and of a next piece that names none."""
        self.tags = listed.tags
        self.spans = [*listed.spans]
        """The policy versions of its tokens so far, in order, each as `(version, tokens)`; the column `version_spans`
        of the finished row has `[start, stop, version]`."""
        self.ended = False
        """Whether it was finished or abandoned here."""
        self._ended_by = ""  # "finished" or "abandoned"
        self._stream = stream
        self._counted = listed.tokens  # the column of tokens
        self._token = token
        self._lease_s = lease_s
        self._pieces = listed.pieces
        self._released = False
        self._unsure = False  # whether the outcome of the last piece is unknown
        self._last: tuple[dict[str, Any], int, int] | None = None  # the arguments of `finish`
        self._turn = asyncio.Lock()

    @property
    def tokens(self) -> int:
        """The number of its tokens so far."""
        return sum(count for _, count in self.spans)

    def __repr__(self) -> str:
        return f"<row {self.key!r} in progress, of stream {self._stream.name!r}>"

    async def append(self, columns: Any, *, version: int | None = None, timeout: float | None = None) -> None:
        """Append a piece: columns of one row, as for `stream.append`, or a reference to such a row. version: the
        policy version that made it; None: that of the piece before. timeout: seconds to wait for room in the node, 60
        if None. Pieces may have different columns.

        Only ragged columns are joined. A text column, as any other, is that of its last piece: pieces of text replace
        each other; append tokens, or the whole text with the last piece.

        An append whose outcome is unknown can be repeated with the same arguments: it is done once. Raises
        LeaseExpired (another has resumed the row, or it was dropped or lost: the piece does not count),
        SchemaMismatch, Backpressure (no room in the node), LimitExceeded, Misuse, OutcomeUnknown (no answer came).
        """
        if isinstance(columns, BatchRef) and columns.is_sliced():
            raise Misuse("a piece of a row that is in progress is no slice of a row: put what it means")
        given = None if version is None else arguments.plain("version", version, 1, (int,))[0]
        async with self._turn:
            self._require()
            made = self.version if given is None else given
            try:
                tokens = await self._bring(columns, made, timeout)
            except Misuse:
                if not self._unsure:
                    raise
                listed = await self._listed()
                self._pieces, self.spans = listed.pieces, [*listed.spans]  # it arrived, and this is another piece
                made = listed.spans[-1][0] if given is None and listed.spans else made
                self._unsure = False
                tokens = await self._bring(columns, made, timeout)
            self.version, self._pieces, self._last = made, self._pieces + 1, None
            if tokens and self.spans and self.spans[-1][0] == made:
                self.spans[-1] = made, self.spans[-1][1] + tokens
            elif tokens:
                self.spans.append((made, tokens))

    async def _bring(self, columns: Any, version: int, timeout: float | None) -> int:
        """Append the next piece. Returns the number of its tokens."""
        unsure, self._unsure = self._unsure, True
        try:
            lengths = await self._put(columns, self._pieces, version, False, timeout)
        except (LeaseExpired, Misuse):  # it did not arrive
            self._unsure = unsure
            raise
        self._unsure = False
        return int(np.frombuffer(lengths.get(self._counted, b""), np.int64).sum())

    async def _put(
        self, columns: Any, number: int, version: int, last: bool, timeout: float | None
    ) -> dict[str, bytes]:
        def piece(digest: bytes) -> RowPiece:
            return RowPiece(self._token, number, version, last, int.from_bytes(digest[:7], "little"))

        return await self._stream.writes.extend([self.key], columns, False, timeout, piece)

    async def finish(self, *, stale_share: float = 0.0, timeout: float | None = None) -> None:
        """Finish the row: from now on it is delivered to tasks, with a column `version_spans`.

        stale_share: sets the row's policy version, which `max_lag` and samplers use: the newest version such that at
        most this share of the row's tokens is older. 0: the version of its oldest token.

        May be repeated. Raises as `append`, and Misuse if the row was abandoned here.
        """
        if not 0.0 <= stale_share < 1.0:
            raise Misuse(f"a share of stale tokens is at least 0 and less than 1, not {stale_share}")
        async with self._turn:
            if self._is("finished"):
                return
            if self._last is None:
                listed = await self._listed()
                self.spans = [*listed.spans]
                version = stale_version(listed.spans, stale_share, listed.version)
                self._last = {SPANS: [_spans(listed.spans)]}, listed.pieces, version
            columns, number, version = self._last
            try:
                await self._put(columns, number, version, True, timeout)
            except Misuse:  # a piece with an unknown outcome arrived in between
                self._last = None
                raise
            self.ended, self._ended_by = True, "finished"

    async def abandon(self) -> None:
        """Drop the row with all its pieces. In its group it counts as dropped. May be repeated. Raises LeaseExpired;
        Misuse if the row was finished here."""
        async with self._turn:
            if not self._is("abandoned"):
                await self._stream.ask(r.AbandonRow(key=self.key, token=self._token), r.Succeeded)
                self.ended, self._ended_by = True, "abandoned"

    async def renew(self) -> None:
        """Renew the lease, as each piece does. Raises LeaseExpired."""
        self._require()
        await self._stream.ask(r.RenewRow(key=self.key, token=self._token), r.Succeeded)

    async def ref(self) -> BatchRef:
        """The row as it is now, with all columns of its pieces; `finish` adds `version_spans`. Raises LeaseExpired."""
        self._require()
        ref = BatchRef.decode((await self._listed()).columns)
        names = [name for name in ref.columns if name != SPANS]
        return ref.select(*names) if names else ref

    async def get(self, *columns: str, timeout: float = 60.0) -> Batch:
        """Read the row as it is now, or these columns of it. Raises as `AsyncPlane.get`, LeaseExpired."""
        timeout, ref = arguments.seconds(timeout), await self.ref()
        return await self._stream._getter.get(ref.select(*columns) if columns else ref, timeout)

    async def _listed(self) -> Listed:
        request = r.ResumeRow(key=self.key, token=self._token, lease_s=self._lease_s)
        return (await self._stream.ask(request, r.UnfinishedRows)).rows[0]

    def _is(self, ended_by: str) -> bool:
        """Whether the row was ended in this way. Raises Misuse if it was ended in another."""
        if self.ended and self._ended_by != ended_by:
            raise Misuse(f"the row {self.key!r} was {self._ended_by} before")
        return self.ended

    def _require(self) -> None:
        if self.ended:
            raise Misuse(f"the row {self.key!r} was {self._ended_by} before")
        self._released = False  # the request takes the row again, unless another has it

    async def __aenter__(self) -> AsyncRow:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.ended or self._released:
            return
        await (self.finish() if kind is None else self.release())

    async def release(self) -> None:
        """Release the row: the next process that resumes it continues it. Does nothing if another process holds it. A
        later call of this object takes the row back, unless another process has resumed it."""
        self._released = True
        try:
            await self._stream.ask(r.RenewRow(key=self.key, token=self._token, free=True), r.Succeeded)
        except DataplaneError:
            return


def _spans(spans: list[tuple[int, int]]) -> Any:
    """Spans in the form of the column `version_spans`."""
    found, first = np.zeros((len(spans), 3), np.int64), 0
    for at, (version, count) in enumerate(spans):
        found[at] = first, first + count, version
        first += count
    return found


async def unfinished_rows(stream: AsyncStream) -> list[Listed]:
    """The first rows in progress, in as many answers as they need."""
    found: list[Listed] = []
    most = _MOST_UNFINISHED
    while len(found) < _MOST_UNFINISHED:
        asked = r.ListUnfinished(most=min(most, _MOST_UNFINISHED - len(found)), after=found[-1].row if found else -1)
        try:
            rows = (await stream.ask(asked, r.UnfinishedRows)).rows
        except LimitExceeded:  # the answer is too large for a message
            if asked.most < 2:
                raise
            most = asked.most // 2
            continue
        found += rows
        if len(rows) < asked.most:
            break
    return found


def row_token() -> int:
    """A new token of a holder."""
    return secrets.randbits(62) | 1


def row_lease(lease: float) -> float:
    """The lease of a row in seconds. Raises Misuse."""
    lease_s = arguments.seconds(lease, what="a lease")
    if not lease_s > 0:
        raise Misuse(f"a lease is of more than 0 s, not {lease}")
    return lease_s
