"""A client's interface to unfinished rows: begun, appended piece by piece, and finished or abandoned.

The pieces stay where they were made, also on different hosts. The finished row is read as one. Its ragged columns that
vary in the first dimension are concatenations of the pieces. Any other column has the value of the last piece that has
the column. A second piece of a dense array is refused, and so is any dense piece of the column of tokens. The column
`version_spans` of the finished row has the policy version of each token: int64 `[spans, 3]`, with the first token of
each span, the token after its last, and the version. Adjacent spans differ in version.

Invariants: a row has one holder, with a random number, the token. A process that resumes the row gets another token,
and pieces with the previous token are refused. A piece counts once, even if its append is repeated.
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
"""Default seconds without a piece or a renewal after which another process may resume a row."""

_MOST_UNFINISHED = 4096


@dataclass(frozen=True, slots=True)
class RowToken:
    """The description of an unfinished row. `stream.resume(key)` returns the row itself, to continue it."""

    key: str
    group: str | int | None
    version: int
    """The policy version with which the row was begun; `AsyncRow.version` is that of the last piece."""
    tags: dict[str, Any]
    pieces: int
    """The number of pieces."""
    spans: list[tuple[int, int]]
    """The spans of tokens with the same policy version, in order, each as `(version, number of tokens)`. The column
    `version_spans` of the finished row has `[start, stop, version]` instead."""
    tokens: int
    """The number of tokens."""
    age_s: float
    """Seconds since the row was begun."""
    free: bool
    """Whether no process holds the row, so that `resume` can take it over."""

    @classmethod
    def of(cls, row: Listed) -> RowToken:
        """The row as its leader lists it."""
        tokens = sum(count for _, count in row.spans)
        return cls(row.key, row.group, row.version, row.tags, row.pieces, row.spans, tokens, row.age_s, row.free)


class AsyncRow:
    """An unfinished row that this process holds. Made by `stream.begin` and `stream.resume`. As a context manager, the
    row is finished at the end of the block, and released if an exception leaves the block."""

    def __init__(self, stream: AsyncStream, listed: Listed, token: int, lease_s: float) -> None:
        self.key = listed.key
        self.group = listed.group
        self.version = listed.spans[-1][0] if listed.spans else listed.version
        """The policy version of the last piece, and the default for the next."""
        self.tags = listed.tags
        self.spans = [*listed.spans]
        """The spans of tokens with the same policy version so far, in order, each as `(version, number of tokens)`. The
        column `version_spans` of the finished row has `[start, stop, version]`."""
        self.ended = False
        """Whether this object has finished or abandoned the row."""
        self._ended_by = ""  # "finished" or "abandoned"
        self._stream = stream
        self._counted = listed.tokens  # the name of the column of tokens
        self._token = token
        self._lease_s = lease_s
        self._pieces = listed.pieces
        self._released = False
        self._unsure = False  # whether the outcome of the last piece is unknown
        self._last: tuple[dict[str, Any], int, int] | None = None  # the arguments of `finish`
        self._turn = asyncio.Lock()

    @property
    def tokens(self) -> int:
        """The number of tokens so far."""
        return sum(count for _, count in self.spans)

    def __repr__(self) -> str:
        return f"<row {self.key!r} in progress, of stream {self._stream.name!r}>"

    async def append(self, columns: Any, *, version: int | None = None, timeout: float | None = None) -> None:
        """Append a piece to the row.

        columns: as for `stream.append`, with one row, or a reference to one row. Pieces may have different columns.
        version: the policy version that made the piece; None: that of the previous piece.
        timeout: seconds to wait for room in the node; 60 if None.

        Only ragged columns are concatenated. In any other column, such as text, a piece replaces the previous one. So
        append tokens, or the whole text with the last piece.

        An append whose outcome is unknown can be repeated with the same arguments, and is done once. Raises
        LeaseExpired (another process has resumed the row, or the row was dropped or lost; the piece does not count),
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
                self._pieces, self.spans = listed.pieces, [*listed.spans]  # the last piece arrived; this is another
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
        except (LeaseExpired, Misuse):  # the piece was not appended
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
        """Finish the row, so that it is delivered to tasks, with the column `version_spans`. May be repeated.

        stale_share: sets the row's policy version, for `max_lag` and samplers, to the newest version such that at most
            this share of the row's tokens is older. 0: the version of the oldest token.

        timeout: as for `append`. Raises as `append`, and Misuse if this object has abandoned the row.
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
            except Misuse:  # a piece with an unknown outcome was appended meanwhile
                self._last = None
                raise
            self.ended, self._ended_by = True, "finished"

    async def abandon(self) -> None:
        """Drop the row with all its pieces. Its group counts it as dropped. May be repeated. Raises LeaseExpired;
        Misuse if this object has finished the row."""
        async with self._turn:
            if not self._is("abandoned"):
                await self._stream.ask(r.AbandonRow(key=self.key, token=self._token), r.Succeeded)
                self.ended, self._ended_by = True, "abandoned"

    async def renew(self) -> None:
        """Renew the lease without a piece. Raises LeaseExpired; Misuse if the row has ended."""
        self._require()
        await self._stream.ask(r.RenewRow(key=self.key, token=self._token), r.Succeeded)

    async def ref(self) -> BatchRef:
        """Return a reference to the current row, with all columns of its pieces, but without `version_spans`. Raises
        LeaseExpired; Misuse if the row has ended."""
        self._require()
        ref = BatchRef.decode((await self._listed()).columns)
        names = [name for name in ref.columns if name != SPANS]
        return ref.select(*names) if names else ref

    async def get(self, *columns: str, timeout: float = 60.0) -> Batch:
        """Read the current row, or these columns of it. Raises as `AsyncPlane.get`, and as `ref`."""
        timeout, ref = arguments.seconds(timeout), await self.ref()
        return await self._stream._getter.get(ref.select(*columns) if columns else ref, timeout)

    async def _listed(self) -> Listed:
        request = r.ResumeRow(key=self.key, token=self._token, lease_s=self._lease_s)
        return (await self._stream.ask(request, r.UnfinishedRows)).rows[0]

    def _is(self, ended_by: str) -> bool:
        """Whether this object has ended the row in this way. Raises Misuse if it has in the other way."""
        if self.ended and self._ended_by != ended_by:
            raise Misuse(f"the row {self.key!r} was {self._ended_by} before")
        return self.ended

    def _require(self) -> None:
        if self.ended:
            raise Misuse(f"the row {self.key!r} was {self._ended_by} before")
        self._released = False  # the next request takes the row back, unless another process has resumed it

    async def __aenter__(self) -> AsyncRow:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.ended or self._released:
            return
        await (self.finish() if kind is None else self.release())

    async def release(self) -> None:
        """Release the row, so that another process can resume it at once. A later call of this object takes the row
        back, unless another process has resumed it. Errors are ignored, for instance that another process holds it."""
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
    """The first unfinished rows of the stream, at most `_MOST_UNFINISHED`, read in as many requests as needed."""
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
