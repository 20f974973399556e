"""Calls whose rows are appended to a stream as one block, and what becomes of each.

A block that is refused, or that finds no room, is halved, down to one call, which waits for room.

What always holds: once a block is done each of its calls has its keys, or its error, or was withdrawn; rows of a call
are appended once or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from dataplane.batch.joining import Form, Taken
from dataplane.clock import Deadline
from dataplane.errors import Backpressure, Closed, DataplaneError, Forked, LimitExceeded, Misuse

if TYPE_CHECKING:
    from dataplane.client.streams import AsyncStream


class Call:
    """The rows of one `send`."""

    __slots__ = (
        "asked",
        "count",
        "deadline",
        "error",
        "form",
        "groups",
        "keys",
        "tags",
        "taken",
        "versions",
        "withdrawn",
    )

    def __init__(
        self,
        form: Form,
        taken: Taken,
        keys: list[str],
        groups: list[Any],
        versions: list[int],
        tags: dict[str, Any],
        deadline: Deadline,
    ) -> None:
        self.deadline = deadline
        self.withdrawn = False
        """Nobody wants it any more."""
        self.asked: asyncio.Task[DataplaneError | None] | None = None  # while it is appended by itself
        self.form, self.count = form, taken.rows
        self.taken: Taken | None = taken
        self.keys, self.groups, self.versions, self.tags = keys, groups, versions, tags
        self.error: BaseException | None = None

    def like(self, other: Call) -> bool:
        """Whether both can be of one append."""
        return (
            self.form is other.form
            and not self.form.alone
            and (not self.keys) is (not other.keys)
            and (not self.groups) is (not other.groups)
            and self.tags.keys() == other.tags.keys()
        )


class Block:
    """Calls whose rows are appended as one."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.rows = self.nbytes = 0
        self.full = False
        """Nothing more is put into it."""
        self.filled = asyncio.Event()
        self.done = asyncio.Event()

    async def bring(self, stream: AsyncStream, unseen: dict[Call, None]) -> None:
        """Append all, as many at a time as there is room for; afterwards each call has its keys or its error, which is
        `unseen`."""
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
                elif len(some) > 1:  # some of them may be taken, also where not all will ever be
                    most = len(some) // 2
                else:
                    some[0].error, left = error, left[1:]
        finally:
            for call in self.calls:
                if call.taken is not None:
                    call.error = call.error or type(ended)(str(ended), **ended.fields)
                    if not call.withdrawn:
                        unseen[call] = None
                call.taken = None  # who asks for the keys may come late
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
        """Append the rows of these calls as one; the error, if they are not. Several do not wait: there may be room for
        some of them, on which a consumer waits that is to make room for the others."""
        first = calls[0]
        try:
            keys = await stream.append_block(
                first.form.joined([call.taken for call in calls if call.taken is not None]),
                keys=[key for call in calls for key in call.keys] if first.keys else None,
                group=[group for call in calls for group in call.groups] if first.groups else None,
                version=[version for call in calls for version in call.versions],
                tags={name: [tag for call in calls for tag in call.tags[name]] for name in first.tags} or None,
                timeout=first.deadline.remaining_s if len(calls) == 1 else 0.0,
            )
        except DataplaneError as error:
            return error
        start = 0
        for call in calls:
            call.keys = keys[start : start + call.count]
            call.taken = None
            start += call.count
        return None


class Sent:
    """Rows that were sent. To be awaited: their keys, once they are in the stream, or the error with which they are
    not."""

    __slots__ = ("_block", "_call", "_unseen")

    def __init__(self, block: Block, call: Call, unseen: dict[Call, None]) -> None:
        self._block = block
        self._call = call
        self._unseen = unseen

    @property
    def done(self) -> bool:
        """Whether it is known what became of them."""
        return self._block.done.is_set()

    def keys(self) -> list[str]:
        """Their keys, once it is `done`. Raises the error with which they are not there."""
        if self._call.error is not None:
            self._unseen.pop(self._call, None)
            raise self._call.error
        return self._call.keys

    async def wait(self) -> list[str]:
        """As awaiting it."""
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
