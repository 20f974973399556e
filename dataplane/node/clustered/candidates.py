"""Candidates for a client's own sampler, of all partitions of a stream; and grants of those that it chose.

Offsets and numbers of groups are a partition's own. Shown together, the partition's number is in their upper bits.

What always holds: candidates come with the number of a moment, and are shown again once any partition has changed
since.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np

from dataplane.clock import Deadline
from dataplane.errors import Closed, Lost, NotReady, OutcomeUnknown, Retryable
from dataplane.node.clustered.asking import all_of, ended
from dataplane.node.clustered.merge import Given
from dataplane.node.clustered.search import taken
from dataplane.node.clustered.session import Session
from dataplane.node.clustered.streams import Partition, Stream
from dataplane.node.streams.delivering import not_ready
from dataplane.node.streams.packed import Index, int64
from dataplane.stream import requests as r
from dataplane.wire import messages as m

_SHIFT = 47  # bits of an offset
_PARTITIONS = 1 << 16
_MOMENTS = 64  # that are remembered
_AGAIN_S = 0.5  # until a partition is asked again that did not answer

Shown = dict[Partition, r.Shown]


class CandidateRows:
    """What one client's samplers are shown."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._moments: dict[int, dict[bytes, int]] = {}  # -> by partition's token, its number of changes
        self._numbers = itertools.count(1)

    async def look(self, request: m.Look, stream: Stream, deadline: Deadline) -> m.Shown:
        """The candidates, once there is something new. Raises NotReady, Closed, Misuse."""
        stream.settings.task(request.task)
        seen = self._moments.get(request.seen, {})
        while True:
            partitions = self._session.partitions(stream)
            shown = await self._now(request, partitions)
            news = any(seen.get(each.token) != reply.changes for each, reply in shown.items())
            if news and any(len(reply.rows) for reply in shown.values()):
                return self.together(request, shown, whole=len(shown) == len(partitions))
            if not deadline.remaining_s:
                raise not_ready(stream.name, request.task, deadline)
            since = {each: shown[each].changes if each in shown else seen.get(each.token, -1) for each in partitions}
            await self._change(request, since, deadline)

    def _asked(self, request: m.Look, seen: int, partitions: int) -> r.Look:
        return r.Look(
            task=request.task,
            columns=tuple(request.columns),
            lengths=tuple(request.lengths),
            tags=tuple(request.tags),
            most=max(1, request.most // partitions),
            seen=seen,
        )

    async def _now(self, request: m.Look, partitions: Sequence[Partition]) -> Shown:
        """What the partitions show that have rows. Raises Closed where all are closed, and done for the task."""
        shown: Shown = {}
        closed: list[Closed] = []

        async def one(partition: Partition) -> None:
            try:
                asked = self._asked(request, -1, len(partitions))
                shown[partition] = await self._session.ask(partition, asked, r.Shown)
            except Closed as error:
                closed.append(error)
            except (Retryable, OutcomeUnknown, Lost):
                return

        await all_of([one(partition) for partition in partitions])
        if len(closed) == len(partitions):
            raise closed[0]
        return shown

    async def _change(self, request: m.Look, since: dict[Partition, int], deadline: Deadline) -> None:
        """Wait until one of the partitions has changed, or all are closed."""
        closed: list[Partition] = []

        async def one(partition: Partition, seen: int) -> None:
            # A queue of its own: each waits for other changes.
            queue = f"{self._session.client} look {next(self._numbers)}"
            try:
                asked = self._asked(request, seen, len(since))
                await self._session.ask(partition, asked, r.Shown, deadline, waits=queue)
            except NotReady:
                return
            except Closed:
                closed.append(partition)
                if len(closed) < len(since):  # others may have something
                    await asyncio.Event().wait()
            except (Retryable, OutcomeUnknown, Lost):
                await asyncio.sleep(_AGAIN_S)

        await ended([one(partition, seen) for partition, seen in since.items()], first=True)

    def together(self, request: m.Look, shown: Shown, *, whole: bool = True) -> m.Shown:
        """What partitions show, as one answer. `whole`: no partition is missing."""
        moment = next(self._numbers)
        self._moments[moment] = {partition.token: reply.changes for partition, reply in shown.items()}
        while len(self._moments) > _MOMENTS:
            del self._moments[next(iter(self._moments))]
        several = list(shown.items())
        counts = [len(reply.rows) for _, reply in several]
        return m.Shown(
            id=request.id,
            changes=moment,
            rows=_joined(_numbered(partition, reply.rows) for partition, reply in several),
            group=_joined(_numbered(partition, reply.group) for partition, reply in several),
            version=_joined(reply.version for _, reply in several),
            age_s=b"".join(reply.age_s for _, reply in several),
            group_rows=_joined(reply.group_rows for _, reply in several),
            group_dropped=_joined(reply.group_dropped for _, reply in several),
            lengths={
                name: _joined(reply.lengths[name] for _, reply in several)
                for name in (request.lengths if several else ())
            },
            tags={
                name: [v for (_, r), n in zip(several, counts, strict=True) for v in r.tags.get(name) or [None] * n]
                for name in dict.fromkeys(name for _, reply in several for name in reply.tags)
            },
            latest=max((reply.latest for _, reply in several), default=0),
            closed=whole and all(reply.closed for _, reply in several),
            whole=whole and all(reply.whole for _, reply in several),
            left=sum(reply.left for _, reply in several),
        )

    def order(self, request: m.Consume, given: Sequence[Given]) -> Index | None:
        """In which order the rows of these grants were chosen; None where partitions chose."""
        if request.sampler is not None:
            return None
        chosen = int64("rows", request.chosen)
        numbers = np.concatenate([_numbered(partition, reply.rows) for partition, reply in given])
        by_number = np.argsort(chosen)
        return np.argsort(by_number[np.searchsorted(chosen, numbers, sorter=by_number)])

    async def take(self, request: m.Consume, stream: Stream) -> list[Given]:
        """Grants of the chosen rows that are ready still, if they are enough; what expires does so in any case. Raises
        NotReady."""
        chosen, expired = int64("rows", request.chosen), int64("rows", request.expired)
        given: list[Given] = []
        enough = False
        try:
            for partition in sorted(self._session.partitions(stream), key=lambda partition: partition.number):
                mine, over = _own(partition, chosen), _own(partition, expired)
                if not (len(mine) or len(over)):
                    continue
                asked = r.Consume(
                    task=request.task,
                    columns=tuple(request.columns),
                    rows=request.rows,
                    min_rows=1,
                    sampler=None,
                    chosen=mine,
                    expired=over,
                    lease_s=request.lease_s,
                )
                with suppress(Retryable, OutcomeUnknown, Lost, Closed):
                    given.append((partition, await taken(self._session, partition, asked)))
            enough = sum(len(reply.rows) for _, reply in given) >= max(1, request.min_rows)
        finally:
            if not enough:
                await self._session.give_back(given)
        if enough:
            return given
        raise NotReady("others have taken these rows", stream=stream.name, task=request.task)


def _numbered(partition: Partition, own: Index) -> Index:
    """Offsets, or numbers of groups, as they are shown; negative ones, which stand for no group, stay negative."""
    here = (partition.number % _PARTITIONS) << _SHIFT
    shown: Index = np.where(own < 0, own - here, own + here)
    return shown


def _own(partition: Partition, shown: Index) -> Index:
    """The offsets of the rows that are this partition's."""
    number = partition.number % _PARTITIONS
    own: Index = shown[shown >> _SHIFT == number] - (number << _SHIFT)
    return own


def _joined(arrays: Iterable[Index]) -> bytes:
    return b"".join(array.tobytes() for array in arrays)
