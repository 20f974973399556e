"""Calls whose rows are appended to a stream as one block, and the result of each.

A block that is refused, or finds no room, is halved, down to one call, which waits for room.

Invariants: once a block is done each of its calls has its keys, or its error, or was withdrawn; rows of a call are
appended once or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from dataplane.batch.put_options import Narrow
from dataplane.batch.row_batcher import RowMemory, RowSchema
from dataplane.batch.values import Values
from dataplane.clock import Deadline
from dataplane.errors import Backpressure, Closed, DataplaneError, Forked, LimitExceeded, Misuse, Retryable

if TYPE_CHECKING:
    from dataplane.client.streams import AsyncStream


_MOST_UNSEEN = 1024  # failed calls that are kept for `flush`, which raises the first error

_NONE: list[Any] = []
"""Shared by all calls without metadata: an object for each row is work for the garbage collector."""


class Kind(NamedTuple):
    """The properties that all calls of one append share. `gathered`: rows are copied into the block as they come in."""

    form: RowSchema
    keyed: bool
    grouped: bool
    tags: tuple[str, ...]
    gathered: bool


class Call:
    """The rows of one `send`: `count` of them, from `start` on if they are gathered, else these `columns`."""

    __slots__ = (
        "asked",
        "columns",
        "count",
        "done",
        "error",
        "groups",
        "keys",
        "start",
        "tags",
        "versions",
        "withdrawn",
    )

    def __init__(
        self, start: int, count: int, keys: list[str], groups: list[Any], versions: list[int], tags: dict[str, Any]
    ) -> None:
        self.start, self.count = start, count
        self.keys, self.groups, self.versions, self.tags = keys, groups, versions, tags
        self.columns: list[Values] = _NONE
        self.withdrawn = False
        """The caller has cancelled it."""
        self.done = False
        """Its rows are in the stream."""
        self.asked: asyncio.Task[DataplaneError | None] | None = None  # while it is appended by itself
        self.error: BaseException | None = None


class Block:
    """Calls of one kind, whose rows are appended as one. `gathered`: the memory with their rows, or None."""

    def __init__(self, kind: Kind, gathered: RowMemory | None, deadline: Deadline, narrow: Narrow = False) -> None:
        self.kind = kind
        self._narrow = narrow
        self.bare = None if kind.keyed or kind.grouped or kind.tags or gathered is None else kind.form
        """The schema of its rows, if they are gathered and have no keys, groups or tags."""
        self.gathered = gathered
        self.calls: list[Call] = []
        self.rows = self.nbytes = 0
        self.full = False
        """No more calls are added to it."""
        self.filled = asyncio.Event()
        self.done = asyncio.Event()
        self._deadline = deadline

    def _columns(self, calls: Sequence[Call]) -> Mapping[str, Values]:
        """The columns of all rows of these calls."""
        form, gathered = self.kind.form, self.gathered
        if gathered is None:
            return form.joined([call.columns for call in calls])
        start, stop = calls[0].start, calls[-1].start + calls[-1].count
        if stop - start == sum([call.count for call in calls]):
            return gathered.columns(start, stop)
        return form.joined([list(gathered.columns(c.start, c.start + c.count).values()) for c in calls])

    async def bring(self, stream: AsyncStream, unseen: dict[Call, None]) -> None:
        """Append all calls, as many at a time as find room. Afterwards each call has its keys or its error; calls with
        an error are added to `unseen`."""
        left, most = self.calls, len(self.calls)
        ended: DataplaneError = Closed("the appender was stopped")
        try:
            while left := [call for call in left if not call.withdrawn]:
                some = left[:most]
                error = await (self._together(some, stream) if len(some) > 1 else self._alone(some[0], stream))
                if error is None:
                    left, most = left[len(some) :], 2 * most
                elif not isinstance(error, Backpressure | LimitExceeded | Misuse) or isinstance(error, Closed | Forked):
                    ended = error
                    break
                elif len(some) > 1:  # some calls may fit, even if all together never do
                    most = len(some) // 2
                else:
                    some[0].error, left = error, left[1:]
        finally:
            for call in self.calls:
                if not call.done:
                    call.error = call.error or type(ended)(str(ended), **ended.fields)
                    if not call.withdrawn and len(unseen) < _MOST_UNSEEN:
                        unseen[call] = None
                call.columns = _NONE  # not needed any more; the caller may keep `Sent` for long
            self.done.set()

    async def _alone(self, call: Call, stream: AsyncStream) -> DataplaneError | None:
        """Append the rows of this call, unless it is withdrawn meanwhile."""
        call.asked = asyncio.get_running_loop().create_task(self._together([call], stream))
        try:
            await asyncio.wait([call.asked])
            return None if call.asked.cancelled() else call.asked.result()
        finally:
            call.asked.cancel()
            call.asked = None

    async def _together(self, calls: list[Call], stream: AsyncStream) -> DataplaneError | None:
        """Append the rows of these calls as one. Returns the error if that fails. Several calls do not wait for room:
        there may be room for some, and their consumer may have to make room for the others."""
        first = calls[0]
        try:
            keys = await stream.writes.append_block(
                self._columns(calls),
                keys=[key for call in calls for key in call.keys] if first.keys else None,
                group=[group for call in calls for group in call.groups] if first.groups else None,
                version=[version for call in calls for version in call.versions],
                tags={name: [tag for call in calls for tag in call.tags[name]] for name in first.tags} or None,
                timeout=self._deadline.remaining_s if len(calls) == 1 else 0.0,
                narrow=self._narrow,
            )
        except DataplaneError as error:
            return error
        except OSError as error:  # no thread can be started
            return Retryable(f"these rows were not appended: {error}")
        start = 0
        for call in calls:
            call.keys = keys[start : start + call.count]
            call.done = True
            start += call.count
        return None


class Sent:
    """Rows that were sent. Await it for their keys, once they are in the stream, or the error."""

    __slots__ = ("_block", "_call", "_unseen")

    def __init__(self, block: Block, call: Call, unseen: dict[Call, None]) -> None:
        self._block = block
        self._call = call
        self._unseen = unseen

    @property
    def done(self) -> bool:
        """Whether the result is known."""
        return self._block.done.is_set()

    def keys(self) -> list[str]:
        """Their keys, once it is `done`. Raises the error."""
        if self._call.error is not None:
            self._unseen.pop(self._call, None)
            raise self._call.error
        return self._call.keys

    async def wait(self) -> list[str]:
        """The same as `await` of this object."""
        await self._block.done.wait()
        return self.keys()

    def withdraw(self) -> None:
        """Do not append them, unless they are already."""
        self._call.withdrawn = True
        self._unseen.pop(self._call, None)
        if self._call.asked is not None:
            self._call.asked.cancel()

    def __await__(self) -> Generator[Any, None, list[str]]:
        return self.wait().__await__()
