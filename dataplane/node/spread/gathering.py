"""Rows of a stream over several hosts, for one client: what its homes grant, put together to one delivery.

This node's home is asked first, and alone where it has enough; its turn passes every so often, so that the others' rows
do not wait for ever. Else every home says how many rows it would give, and those of older policy versions give first.
Nothing is held while more is waited for: what was granted and does not suffice is given back, and each home tells when
it has more. Who needs rows of several homes asks them in the order of their nodes, so that of two who want the same
rows one gets them.

What always holds: a delivery of several homes has a number of its own, which stands for what each granted, and is
answered for as a whole; it ends when what it stands for ends.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from dataplane.clock import Deadline
from dataplane.errors import Closed, DataplaneError, LeaseExpired, NotReady, PeerUnavailable
from dataplane.node.spread.looking import Looking
from dataplane.node.spread.merging import Told, keyed, merged, reordered
from dataplane.node.spread.reach import Reach, all_of, ended
from dataplane.node.spread.wholes import Part, Whole
from dataplane.node.streams.delivering import not_ready
from dataplane.wire import messages as m

_IN_A_ROW = 8  # deliveries of this node's home before the others are looked at
_LOOK_S = 0.5  # how often homes are asked again by a sampler that judges by age

States = dict[Part, m.Watched]


class Gathering:
    """The deliveries of one client that come of several homes."""

    def __init__(self, reach: Reach, looking: Looking) -> None:
        self._reach = reach
        self._looking = looking
        self._wholes = reach.wholes
        self._numbers = itertools.count(1)
        self._granted: dict[int, Sequence[Told]] = {}
        self._in_a_row = 0

    async def consume(self, request: m.Consume, whole: Whole, deadline: Deadline) -> m.Reply:
        """Rows of a task, once there are enough. Raises NotReady, Closed, Misuse."""
        told = await self.compose(request, whole, deadline)
        if len(told) == 1:
            part, reply = told[0]
            reply = msgspec.structs.replace(reply, id=request.id)
            return reply if part is whole.here else keyed(part, reply)
        number = next(self._numbers)
        self._granted[number] = told
        reply = merged(request.id, whole.token, told, number, request.replica)
        order = self._looking.order(request, told)
        return reply if order is None else reordered(reply, order)

    async def compose(self, request: m.Consume, whole: Whole, deadline: Deadline) -> list[Told]:
        """The grants that make a delivery. Raises as `consume`."""
        if request.sampler is None:
            return await self._looking.take(request, whole)
        # Of those who wait here for the same, one does so at the homes: else each row would wake them all.
        same = (request.task, request.rows, request.min_rows, *request.columns, msgspec.msgpack.encode(request.sampler))
        try:
            async with asyncio.timeout(deadline.remaining_s) as waiting, whole.turn(same):
                waiting.reschedule(None)
                return await self._compose(request, whole, deadline)
        except TimeoutError:
            raise not_ready(whole.name, request.task, deadline) from None

    async def _compose(self, request: m.Consume, whole: Whole, deadline: Deadline) -> list[Told]:
        if self._in_a_row < _IN_A_ROW and not whole.stream.home.closed:  # else it would not wait for the others' rows
            with suppress(NotReady):
                here = await self._take(whole.here, request, request.rows, request.min_rows)
                self._in_a_row += 1
                return [(whole.here, here)]
        self._in_a_row = 0
        states: States = {}
        while True:
            for part in await self._wholes.parts(whole):
                states.setdefault(part, m.Watched(0, 0, 0, 0.0, -1, closed=False))
            states = {part: state for part, state in states.items() if self._wholes.alive(part)}
            await self._update(states, request, dict.fromkeys(states, 0), Deadline.after(0.0))
            enough = self._enough(request, states)
            if sum(state.ready for state in states.values()) >= enough:
                told = await self._collect(request, whole, states, enough)
                if told:
                    return told
                continue
            if not deadline.remaining_s:
                raise not_ready(whole.name, request.task, deadline)
            await self._more(states, request, enough, deadline)

    def _enough(self, request: m.Consume, states: States) -> int:
        """How many rows there must be. Raises Closed where none will ever come."""
        if not all(state.closed for state in states.values()):
            return request.min_rows
        left = sum(state.left for state in states.values())
        if not left:
            raise Closed("the stream is closed, and this task has done all of it", drained=True)
        return min(request.min_rows, left)

    async def _more(self, states: States, request: m.Consume, enough: int, deadline: Deadline) -> None:
        """Wait until a home has so many more rows that there may be enough, or until something else is new."""
        short = enough - sum(state.ready for state in states.values())
        share = -(-short // len(states))  # of the rows that are short, one home has at least so many
        least = {part: state.ready + max(1, share) for part, state in states.items()}
        judges_age = bool(getattr(request.sampler, "judges_age", False))
        wait = Deadline.after(min(deadline.remaining_s, _LOOK_S) if judges_age else deadline.remaining_s)
        await self._update(states, request, least, wait, first=True)

    async def _update(
        self, states: States, request: m.Consume, least: dict[Part, int], deadline: Deadline, *, first: bool = False
    ) -> None:
        """Ask all homes how many rows they would give; with `first`, until the first has an answer."""

        async def one(part: Part) -> None:
            asked = m.Watch(
                0,
                part.token,
                request.task,
                request.rows,
                request.columns,
                request.sampler,
                least[part],
                states[part].left,
                states[part].closed,
                deadline.remaining_s,
            )
            try:
                states[part] = await self._reach.ask(part, asked, m.Watched, deadline)
            except PeerUnavailable:
                del states[part]

        await ended([one(part) for part in states], first=first)

    # taking

    async def _take(self, part: Part, request: m.Consume, rows: int, least: int) -> m.Delivered:
        asked = msgspec.structs.replace(
            request, id=request.id, stream=part.token, rows=rows, min_rows=min(least, rows), timeout_s=0.0
        )
        return await self._reach.ask(part, asked, m.Delivered)

    async def _collect(self, request: m.Consume, whole: Whole, states: States, enough: int) -> list[Told]:
        """Grants of enough rows or, where others were faster, none."""
        size = getattr(request.sampler, "group_size", None) or 1
        told: list[Told] = []
        count = 0
        try:
            for part in self._in_order(request, whole, states, enough):
                if request.rows - count < size:
                    break
                short = enough - count
                try:
                    least = short if states[part].ready >= short else 1
                    reply = await self._take(part, request, request.rows - count, max(1, least))
                except (NotReady, Closed, PeerUnavailable):
                    if len(told) or states[part].ready < enough:
                        continue
                    break
                told.append((part, reply))
                count += len(reply.versions)
        except BaseException:
            await self._give_back(request, told)
            raise
        if count >= enough or (told and request.rows - count < size):
            return told
        await self._give_back(request, told)
        return []

    def _in_order(self, request: m.Consume, whole: Whole, states: States, enough: int) -> list[Part]:
        """The homes that have rows, in the order in which they are to give."""
        ready = [part for part, state in states.items() if state.ready]
        alone = any(states[part].ready >= enough for part in ready)

        def turn(part: Part) -> tuple[Any, ...]:
            here = part is whole.here
            return (states[part].version, not here, -states[part].age_s) if alone else (states[part].version, part.node)

        return sorted(ready, key=turn)

    async def _give_back(self, request: m.Consume, told: Sequence[Told]) -> None:
        for part, reply in told:
            ack = m.Ack(0, part.token, reply.grant, request.replica, done=False, seen=False)
            with suppress(DataplaneError):
                await self._reach.ask(part, ack, m.Done)

    # answering for it

    def _find(self, number: int) -> Sequence[Told]:
        granted = self._granted.get(number)
        if granted is None:
            raise LeaseExpired(
                "these rows were not acknowledged in time, or given back, and go to others; what was computed"
                " from them does not count"
            )
        return granted

    async def ack(self, request: m.Ack) -> None:
        """The client is done with a delivery, or gives it back. Raises LeaseExpired, and then none of it counts;
        PeerUnavailable where it is not known whether all of it does."""
        told = self._find(request.grant)
        try:
            await self.settle(self._reach, told, done=request.done, seen=request.seen)
        finally:
            self._granted.pop(request.grant, None)

    async def renew(self, request: m.Renew) -> None:
        """The leases of a delivery begin again. Raises LeaseExpired."""
        told = self._find(request.grant)
        await self.each(self._reach, told, lambda part, number: m.Renew(0, part.token, number, None))

    @staticmethod
    async def each(reach: Reach, told: Sequence[Told], make: Callable[[Part, int], Any]) -> None:
        """Ask the homes of all grants what `make` makes for each. Raises LeaseExpired, also where one has died;
        PeerUnavailable where one dies meanwhile, and may have done it."""
        for part, _ in told:
            if not reach.wholes.alive(part):
                raise LeaseExpired(f"some of these rows go to others: their home, node {part.node.hex()}, has died")
        await all_of([reach.ask(part, make(part, reply.grant), m.Done) for part, reply in told])

    @staticmethod
    async def settle(reach: Reach, told: Sequence[Told], *, done: bool, seen: bool) -> None:
        """As `ack`, for grants of one home or of several. All of a delivery is done, or none of it: those who do not
        hold their rows any more are found before anybody is told."""

        def ack(part: Part, number: int, done: bool = done) -> m.Ack:
            return m.Ack(0, part.token, number, None, done, seen)

        several = done and len(told) > 1
        if several:
            try:
                await Gathering.each(reach, told, lambda part, number: m.Renew(0, part.token, number, None))
            except DataplaneError:
                for part, reply in told:
                    if reach.wholes.alive(part):
                        reach.soon(part, ack(part, reply.grant, done=False))
                raise
        try:
            await Gathering.each(reach, told, ack)
        except LeaseExpired as error:
            if several:  # it held on a moment ago
                raise PeerUnavailable(f"some of these rows may be done, and some are not: {error}") from None
            raise

    def leave(self) -> None:
        """The client has gone; its homes are told so by others."""
        self._granted.clear()
