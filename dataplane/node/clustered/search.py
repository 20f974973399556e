"""One client's request for rows, taken to the partitions of its stream.

`one` asks partition after partition, this node's first (`partitions.consuming`). `several` has all partitions say how
many rows they would give; those of older policy versions give first, for `Freshest` those of newer ones. Nothing is
held while more is waited for: grants that do not suffice are given back, and each partition tells when it has more.
Rows of several partitions are taken in the order of their numbers, so that of two clients that want the same rows one
gets them.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import msgspec

from dataplane.clock import Deadline
from dataplane.errors import Closed, Lost, Misuse, NotReady, OutcomeUnknown, Retryable
from dataplane.node.clustered.asking import ended
from dataplane.node.clustered.merge import Given
from dataplane.node.clustered.session import Session
from dataplane.node.clustered.streams import Partition, Stream
from dataplane.stream import requests as r
from dataplane.stream.sampler import Freshest
from dataplane.wire import messages as m

_LOOK_S = 0.5  # how often partitions are asked again for a sampler that judges by age

States = dict[Partition, r.Watched]
_UNSEEN = r.Watched(ready=0, version=0, age_s=0.0, left=-1, closed=False)


def newest_first(sampler: Any) -> bool:
    """Whether newer policy versions come before older ones."""
    return isinstance(getattr(sampler, "within", sampler) or sampler, Freshest)


async def taken(session: Session, partition: Partition, asked: r.Consume) -> r.Delivered:
    """Rows of a partition; what it gives too late is given back. Raises as `Session.ask`."""

    def late(given: r.Delivered) -> None:
        session.give_back_soon(partition, given)

    return await session.ask(partition, asked, r.Delivered, late=late)


class Search:
    """One request for rows, over the partitions of its stream."""

    def __init__(self, session: Session, request: m.Consume, stream: Stream) -> None:
        self._session = session
        self._stream = stream
        self._min_rows = request.min_rows
        self._newest_first = newest_first(request.sampler)
        self._size = getattr(request.sampler, "group_size", None) or 1
        self._judges_age = bool(getattr(request.sampler, "judges_age", False))
        self._asked = r.Consume(
            task=request.task,
            columns=tuple(request.columns),
            rows=request.rows,
            min_rows=request.min_rows,
            sampler=request.sampler,
            lease_s=request.lease_s,
            member=request.member,
        )
        what = (request.task, request.rows, request.min_rows, request.columns, request.sampler)
        self.queue = f"{stream.name}/{stream.generation} {msgspec.json.encode(what).decode()}"
        self._states: States = {}
        self._unheard: set[Partition] = set()  # those that did not answer when they were last asked

    async def one(self, deadline: Deadline) -> list[Given]:
        """The grant of the first partition that gives enough, or none before the deadline. Raises Closed."""
        found = await self._session.consume(self._stream, self.queue, self._asked, deadline)
        if found is None:
            return []
        if self._short(len(found[1].rows)):  # it is closed and has no more, or its next group does not fit
            await self._session.give_back([found])
            return []
        return [found]

    async def all_now(self) -> list[Given]:
        """What all partitions together give now, if it is enough."""
        await self._update(dict.fromkeys(self._partitions(), 0), Deadline.after(0.0))
        return await self._collect(self._enough()) if self._ready() else []

    async def several(self, deadline: Deadline) -> list[Given]:
        """Enough rows of several partitions, or none before the deadline. Raises Closed."""
        known = False
        while True:
            partitions = self._partitions()
            if not known:
                await self._update(dict.fromkeys(partitions, 0), Deadline.after(0.0))
            enough = self._enough()
            if self._ready() >= enough:
                given = await self._collect(enough)
                if given:
                    return given
                known = False  # others were faster
                continue
            given = await self._full() if self._size > 1 else []
            if given or not (deadline.remaining_s or known):
                return given
            known = await self._more(enough, deadline) and {*partitions} == {*self._partitions()}

    def _partitions(self) -> list[Partition]:
        partitions = self._session.partitions(self._stream)
        self._states = {each: self._states.get(each, _UNSEEN) for each in partitions}
        self._unheard.intersection_update(partitions)
        return partitions

    def _ready(self) -> int:
        return sum(state.ready for state in self._states.values())

    def _enough(self) -> int:
        """How many rows there must be. Raises Closed where none will ever come."""
        if self._unheard or not all(state.closed for state in self._states.values()):
            return self._min_rows
        left = sum(state.left for state in self._states.values())
        if not left:
            raise Closed("the stream is closed, and this task has done all of it", drained=True)
        return min(self._min_rows, left)

    async def _more(self, enough: int, deadline: Deadline) -> bool:
        """Wait until a partition has so many more rows that there may be enough, or something else is new. Whether a
        partition has said so, and nothing need be asked of the others."""
        states = {each: state for each, state in self._states.items() if each not in self._unheard}
        wait_s = min(deadline.remaining_s, _LOOK_S) if self._judges_age or self._unheard else deadline.remaining_s
        if not states:
            await asyncio.sleep(wait_s)
            return False
        short = enough - self._ready()
        share = max(1, -(-short // len(states)))  # of the rows that are short, one partition has at least so many
        least = {each: state.ready + share for each, state in states.items()}
        await self._update(least, Deadline.after(wait_s), first=True)
        changed = [self._states[each] for each, state in states.items() if self._states[each] is not state]
        return bool(changed) and not any(state.closed for state in changed) and not self._unheard

    async def _update(self, least: dict[Partition, int], deadline: Deadline, *, first: bool = False) -> None:
        """Ask these partitions how many rows they would give; with `first`, until the first answers, which it does when
        it has `least` or something else is new."""

        async def one(partition: Partition) -> None:
            watch = self._watch(least[partition], self._states[partition])
            # A queue of its own: who waits for fewer rows must not wait behind who waits for more.
            waits = f"{self._session.client} {id(self)}" if first else ""
            try:
                self._states[partition] = await self._session.ask(
                    partition, watch, r.Watched, deadline if first else None, waits=waits
                )
                self._unheard.discard(partition)
            except NotReady:
                return
            except (Retryable, OutcomeUnknown, Lost, Closed):
                self._states[partition] = _UNSEEN
                self._unheard.add(partition)

        await ended([one(partition) for partition in least], first=first)

    def _watch(self, least: int, known: r.Watched) -> r.Watch:
        asked = self._asked
        return r.Watch(
            task=asked.task,
            rows=asked.rows,
            columns=asked.columns,
            sampler=asked.sampler,
            least=least,
            left=known.left,
            closed=known.closed,
        )

    async def _collect(self, enough: int) -> list[Given]:
        """Grants of enough rows or, where others were faster, none."""
        given: list[Given] = []
        count, rows, full = 0, self._asked.rows, False
        try:
            for partition in self._in_order(enough):
                if rows - count < self._size:
                    break
                short = enough - count
                ready = self._states[partition].ready
                try:
                    reply = await self._take(partition, rows - count, short if ready >= short else 1)
                except Misuse:
                    if not given:
                        raise
                    full = True  # its next group does not fit beside those of others
                    continue
                except (Retryable, OutcomeUnknown, Lost, Closed):
                    if given or ready < enough:
                        continue
                    break
                given.append((partition, reply))
                count += len(reply.rows)
        except BaseException:
            await self._session.give_back(given)
            raise
        if count >= enough or (given and (full or rows - count < self._size)):
            return given
        await self._session.give_back(given)
        return []

    async def _full(self) -> list[Given]:
        """Of groups that are given whole: those of one partition, to which no other that it has fits."""
        for partition in self._in_order(0):
            with suppress(Retryable, OutcomeUnknown, Lost, Closed):
                given = partition, await self._take(partition, self._asked.rows, self._min_rows)
                last = True
                try:
                    last = await self._last(given)
                finally:
                    if last:
                        await self._session.give_back([given])
                if not last:
                    return [given]
        return []

    async def _last(self, given: Given) -> bool:
        """Whether these are fewer rows than were asked for since they are the last of a closed partition: those of
        others may fit beside them."""
        count = len(given[1].rows)
        if not self._short(count):
            return False
        state = await self._session.ask(given[0], self._watch(0, _UNSEEN), r.Watched)
        return state.closed and state.left <= count

    def _short(self, count: int) -> bool:
        """Whether a partition gave so few rows that those of others may fit beside them."""
        return count < self._min_rows and self._asked.rows - count >= self._size

    async def _take(self, partition: Partition, rows: int, least: int) -> r.Delivered:
        asked = msgspec.structs.replace(self._asked, rows=rows, min_rows=max(1, min(least, rows)))
        return await taken(self._session, partition, asked)

    def _in_order(self, enough: int) -> list[Partition]:
        """The partitions that have rows, in the order in which they are to give."""
        ready = [partition for partition, state in self._states.items() if state.ready]
        alone = any(self._states[partition].ready >= enough for partition in ready)

        def turn(partition: Partition) -> tuple[Any, ...]:
            state = self._states[partition]
            version = -state.version if self._newest_first else state.version
            return (version, -state.age_s) if alone else (version, partition.number)

        return sorted(ready, key=turn)
