"""A sampler of the user's own over a stream on several hosts: it is shown what all homes show, and each home is asked
for those of its rows that were chosen.

Rows and groups have numbers of their own at each home. Shown together, they have numbers that say whose they are: which
home in the upper bits, its number in the lower.

What always holds: what is shown comes with the number of a moment, and is shown again once any home has changed since.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.errors import Closed, LeaseExpired, NotReady, PeerUnavailable
from dataplane.node.spread.merging import Told
from dataplane.node.spread.reach import Reach, ended
from dataplane.node.spread.wholes import Part, Whole
from dataplane.node.streams import packed
from dataplane.node.streams.delivering import not_ready
from dataplane.wire import messages as m

_SHIFT = 47  # bits of a row's number at its home
_MOMENTS = 64  # that are remembered
_MOST = m.MAX_FRAME // 2

Shown = dict[Part, m.Shown]


class Looking:
    """What one client's samplers are shown."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._wholes = reach.wholes
        self._known: list[Part] = []
        self._moments: dict[int, dict[Part, int]] = {}
        self._numbers = itertools.count(1)

    async def look(
        self, request: m.Look, whole: Whole, deadline: Deadline, waiting: Callable[[], Any] = lambda: None
    ) -> m.Shown:
        """What there is to choose from, once there is something new, or `waiting` for the replica. Raises NotReady,
        Closed, Misuse."""
        seen = self._moments.get(request.seen, {})
        while True:
            if waiting() is not None:
                return self._together(request, {})
            shown = await self._ask(request, whole, dict.fromkeys(await self._wholes.parts(whole), -1), deadline)
            news = any(part not in seen or reply.changes > seen[part] for part, reply in shown.items())
            if news and any(len(reply.rows) for reply in shown.values()):
                return self._together(request, shown)
            since = {part: max(seen.get(part, -1), shown[part].changes if part in shown else -1) for part in shown}
            since |= {part: -1 for part in await self._wholes.parts(whole) if part not in since}
            await self._ask(request, whole, since, deadline, first=True)

    async def _ask(
        self, request: m.Look, whole: Whole, since: dict[Part, int], deadline: Deadline, *, first: bool = False
    ) -> Shown:
        """What the homes show that have rows or, with `first`, the one that does so first. Raises NotReady, Closed
        where all are."""
        shown: Shown = {}
        errors: list[Exception] = []

        async def one(part: Part, seen: int) -> None:
            wait = deadline if first else Deadline.after(0.0)
            asked = msgspec.structs.replace(
                request,
                id=0,
                stream=part.token,
                member="",
                replica=None,
                replicas=0,
                seen=seen,
                most=max(1, request.most // len(since)),
                timeout_s=wait.remaining_s,
            )
            try:
                shown[part] = await self._reach.ask(part, asked, m.Shown, wait)
            except (NotReady, Closed, PeerUnavailable) as error:
                errors.append(error)
                if first and isinstance(error, Closed | PeerUnavailable):
                    await asyncio.Event().wait()  # others may have something

        asked = [one(part, seen) for part, seen in since.items()]
        await ended(asked, first=first, timeout_s=deadline.remaining_s if first else None)
        if not first and errors and all(isinstance(error, Closed) for error in errors) and len(errors) == len(since):
            raise errors[0]
        if first and not shown and not deadline.remaining_s:
            raise not_ready(whole.name, request.task, deadline)
        return shown

    def _together(self, request: m.Look, shown: Shown) -> m.Shown:
        moment = next(self._numbers)
        self._moments[moment] = {part: reply.changes for part, reply in shown.items()}
        self._moments.pop(moment - _MOMENTS, None)
        several = list(shown.items())
        counts = [len(reply.rows) // 8 for _, reply in several]
        return m.Shown(
            id=request.id,
            changes=moment,
            rows=b"".join(self._numbered(part, reply.rows) for part, reply in several),
            group=b"".join(self._numbered(part, reply.group) for part, reply in several),
            version=b"".join(reply.version for _, reply in several),
            age_s=b"".join(reply.age_s for _, reply in several),
            group_rows=b"".join(reply.group_rows for _, reply in several),
            group_dropped=b"".join(reply.group_dropped for _, reply in several),
            lengths={
                name: b"".join(r.lengths[name] for _, r in several) for name in (request.lengths if several else ())
            },
            tags={
                name: [v for (_, r), n in zip(several, counts, strict=True) for v in r.tags.get(name) or [None] * n]
                for name in dict.fromkeys(name for _, r in several for name in r.tags)
            },
            latest=max((reply.latest for _, reply in several), default=0),
            closed=all(reply.closed for _, reply in several),
            whole=all(reply.whole for _, reply in several),
            left=sum(reply.left for _, reply in several),
        )

    def _numbered(self, part: Part, numbers: bytes) -> bytes:
        """Numbers of rows or groups at the home of this part, as they are shown; what is negative stays so."""
        if part not in self._known:
            self._known.append(part)
        here, own = self._known.index(part) << _SHIFT, packed.int64("numbers", numbers)
        return np.where(own < 0, own - here, own + here).tobytes()

    def order(self, request: m.Consume, told: Sequence[Told]) -> packed.Index | None:
        """In which order the rows of these grants were chosen; None where homes chose."""
        if request.sampler is not None:
            return None
        chosen = packed.int64("rows", request.chosen)
        numbers = []
        for part, reply in told:
            origin = BatchRef.decode(reply.ref).origin()
            if origin is not None:
                numbers.append(origin[1] + (self._known.index(part) << _SHIFT))
        by_number = np.argsort(chosen)
        at = by_number[np.searchsorted(chosen, np.concatenate(numbers), sorter=by_number)]
        return np.argsort(at)

    async def take(self, request: m.Consume, whole: Whole) -> list[Told]:
        """Those of the rows that were chosen that are ready still, if they are enough; what expires does so in any
        case. Raises NotReady."""
        chosen, expired = packed.int64("rows", request.chosen), packed.int64("rows", request.expired)
        told: list[Told] = []
        for number, part in enumerate(self._known):
            mine = chosen[chosen >> _SHIFT == number] - (number << _SHIFT)
            over = expired[expired >> _SHIFT == number] - (number << _SHIFT)
            if not (len(mine) or len(over)) or not self._wholes.alive(part):
                continue
            asked = msgspec.structs.replace(
                request,
                id=0,
                stream=part.token,
                min_rows=1,
                chosen=mine.tobytes(),
                expired=over.tobytes(),
                member="",
                replica=None,
                replicas=0,
            )
            try:
                told.append((part, await self._reach.ask(part, asked, m.Delivered)))
            except (NotReady, Closed, PeerUnavailable):
                continue
        if sum(len(reply.versions) for _, reply in told) >= max(1, request.min_rows):
            return told
        for part, reply in told:
            ack = m.Ack(0, part.token, reply.grant, None, done=False, seen=False)
            try:
                await self._reach.ask(part, ack, m.Done)
            except (LeaseExpired, Closed, PeerUnavailable):
                continue
        raise NotReady("others have taken these rows", stream=whole.name, task=request.task)
