"""One client's way to the homes of all parts of streams: those here are asked directly, those of other nodes in its
name.

What always holds: what is asked of a home on this node never leaves it; when the client goes, every node that was asked
for it is told.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from dataplane.clock import Deadline
from dataplane.errors import DataplaneError, Misuse, ProtocolMismatch
from dataplane.node.spread.holds import Holds
from dataplane.node.spread.limits import Limits
from dataplane.node.spread.mirrors import Mirrors
from dataplane.node.spread.wholes import Part, Whole, Wholes
from dataplane.node.streams import packed
from dataplane.node.streams.streaming import Streaming
from dataplane.wire import messages as m
from dataplane.wire import peer_messages as pm

R = TypeVar("R", bound=m.Message)
T = TypeVar("T")

_numbers = itertools.count(1)

Found = list[tuple[Part, packed.Index, packed.Index]]
"""Rows by part: the part, which of the rows in question (positions), and their numbers there, if it was asked."""


class Reach:
    """The homes, as one client reaches them. `streams` are those here, as it does."""

    def __init__(self, streams: Streaming, wholes: Wholes, mirrors: Mirrors, limits: Limits, holds: Holds) -> None:
        self.streams = streams
        self.wholes = wholes
        self.mirrors = mirrors
        self.limits = limits
        self.holds = holds
        self._number = next(_numbers)
        self._asked: set[bytes] = set()  # nodes
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, part: Part, request: Any, kind: type[R], deadline: Deadline | None = None) -> R:
        """What the home of this part answers. Raises that, and PeerUnavailable."""
        if part.node != self.wholes.node:
            self._asked.add(part.node)
            wait_s = 0.0 if deadline is None else deadline.remaining_s
            return await self.wholes.asking.ask(part.node, self._number, request, kind, wait_s)
        answer = self.streams.answer(request, deadline or Deadline.after(0.0))
        reply = answer if isinstance(answer, m.Message) else m.Done(0) if answer is None else await answer()
        assert isinstance(reply, kind), "a home here answers as it should"
        return reply

    def soon(self, part: Part, request: Any) -> None:
        """Ask without waiting for the answer, which does not matter."""

        self.run_soon(self.ask(part, request, m.Message))

    def run_soon(self, asking: Coroutine[Any, Any, object]) -> None:
        """Run this without waiting for it; what it raises does not matter."""

        async def run() -> None:
            with suppress(DataplaneError):
                await asking

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def of_all(self, whole: Whole, make: Callable[[Part], Any], kind: type[R]) -> list[tuple[Part, R]]:
        """What the homes of all parts answer to what `make` makes for each. Raises as the first that fails."""
        parts = await self.wholes.parts(whole)
        return list(zip(parts, await all_of([self.ask(part, make(part), kind) for part in parts]), strict=True))

    async def rows_of(self, whole: Whole, count: int, origins: Sequence[tuple[bytes, bytes]], keys: list[str]) -> Found:
        """The parts that rows are in, by the origins of `count` rows or by key. Raises Misuse for what is in no part of
        the stream, ProtocolMismatch."""
        if keys:
            return await self._keyed(whole, keys)
        found, named = [], np.zeros(count, np.int64)
        for token, positions_packed in origins:
            of, part = await self.wholes.route(token)
            if of is not whole:
                raise Misuse(f"these rows were delivered by another stream than {whole.name!r}")
            positions = packed.int64("positions", positions_packed)
            ascend = (positions[1:] > positions[:-1]).all()
            if not ascend or (len(positions) and not 0 <= positions[0] <= positions[-1] < count):
                raise ProtocolMismatch("positions that are not in order, or of rows that there are not")
            named[positions] += 1
            found.append((part, positions, packed.NOTHING))
        if not (named == 1).all():
            raise ProtocolMismatch("rows of which it is not said once where they are from")
        return found

    async def _keyed(self, whole: Whole, keys: list[str]) -> Found:
        found, placed = [], np.zeros(len(keys), np.bool_)
        for part, answer in await self.of_all(whole, lambda part: m.Where(0, part.token, keys), m.Placed):
            rows = packed.numbers("rows", answer.rows, len(keys))
            positions = np.flatnonzero((rows >= 0) & ~placed)
            placed[positions] = True
            if len(positions):
                found.append((part, positions, rows[positions]))
        if not placed.all():
            missing = keys[int(np.flatnonzero(~placed)[0])]
            raise Misuse(f"there is no row {missing!r}: it was never appended here, or each task is done with it")
        return found

    def leave(self) -> None:
        """The client has gone."""
        self.limits.leave(self)
        for node in self._asked:
            gone = pm.ClientGone(self.wholes.asking.next_id(), self.wholes.node, self._number)
            self.wholes.asking.tell_soon(node, gone)
        self._asked.clear()


async def all_of(asked: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The answers to all; the first error, once all have ended."""
    if len(asked) == 1:
        return [await asked[0]]
    found = await asyncio.gather(*asked, return_exceptions=True)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found  # type: ignore[return-value]


async def ended(asked: Iterable[Coroutine[Any, Any, None]], *, first: bool, timeout_s: float | None = None) -> None:
    """Wait until all have ended or, with `first`, one has; then no other is under way any more. Raises what one did."""
    tasks = [asyncio.ensure_future(each) for each in asked]
    try:
        how = asyncio.FIRST_COMPLETED if first else asyncio.ALL_COMPLETED
        done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=how)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
