"""Consume with a sampler that runs in this process: the leader sends candidates, the sampler chooses, and the leader
grants those rows that nobody else has taken meanwhile.

The candidates are the oldest rows, at most `m.MAX_ROWS` and as many as fit into a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from dataplane.client.arguments import names
from dataplane.errors import Misuse, NotReady
from dataplane.stream import requests as r
from dataplane.stream.page import Index
from dataplane.stream.sampler import Candidates, Sampler, checked
from dataplane.wire import messages as m

R = TypeVar("R", bound=r.Result)

_NONE: Index = np.empty(0, np.int64)
_FIRST = 1 << 14  # rows that the sampler is shown first
_AGE_S = 0.5  # how often a sampler that judges by age is asked again


class Ask(Protocol):
    """Sends a request to a stream. Returns an answer of type `kind` within `timeout_s` seconds."""

    async def __call__(self, asked: r.FromClient, kind: type[R], timeout_s: float) -> R: ...


class Sampling:
    """One consume with a sampler of the user. `asked`: the request, without the choice."""

    def __init__(self, ask: Ask, sampler: Sampler, asked: r.Consume) -> None:
        self.ask = ask
        self.sampler = sampler
        self.asked = asked

    async def run(self, deadline_s: float) -> r.Delivered:
        """Lease rows once the sampler chooses enough. Raises NotReady, Closed, Misuse, and the errors of the
        sampler."""
        loop, asked = asyncio.get_running_loop(), self.asked
        judges_age = bool(getattr(self.sampler, "judges_age", False))
        until, seen, most = loop.time() + deadline_s, -1, max(_FIRST, asked.rows)
        while True:
            left = max(0.0, until - loop.time())
            try:
                shown = await self._look(seen, most, min(left, _AGE_S) if judges_age else left)
            except NotReady:
                if loop.time() >= until:
                    raise
                seen = -1
                continue
            if not len(shown.rows):  # a grant to another replica waits for this one
                return await self._take(_NONE, _NONE, 1)
            candidates = _candidates(shown)
            choice = checked(self._choose(candidates), candidates, asked.rows)
            if not choice.full and len(choice.rows) < asked.rows and not shown.whole and most < m.MAX_ROWS:
                most *= 4
                continue
            seen = shown.changes
            least = min(asked.min_rows, shown.left) if shown.closed else asked.min_rows
            least = len(choice.rows) if choice.full else least
            if (len(choice.rows) < least or not len(choice.rows)) and not len(choice.expired):
                continue
            try:
                return await self._take(shown.rows[choice.rows], shown.rows[choice.expired], max(1, least))
            except NotReady:
                if loop.time() >= until:
                    raise
                seen = -1  # others took these rows, which changes nothing for those that are left

    def _choose(self, candidates: Candidates) -> Any:
        try:
            return self.sampler.choose(candidates, self.asked.rows)
        except KeyError as error:
            if error.args and (error.args[0] in candidates.lengths or error.args[0] in candidates.tags):
                raise
            named = f"its `needs` are {getattr(self.sampler, 'needs', ())!r}"
            named += f", its `tags_read` {getattr(self.sampler, 'tags_read', ())!r}"
            raise Misuse(
                f"{type(self.sampler).__name__}.choose looked for {error}: a sampler names the columns whose lengths it"
                f" reads in `needs`, and tags in `tags_read`; {named}"
            ) from error

    async def _look(self, seen: int, most: int, timeout_s: float) -> r.CandidateRows:
        asked = self.asked
        look = r.Look(
            task=asked.task,
            columns=asked.columns,
            most=most,
            lengths=tuple(names("needs", getattr(self.sampler, "needs", ()))),
            tags=tuple(names("tags_read", getattr(self.sampler, "tags_read", ()))),
            seen=seen,
            member=asked.member,
            replica=asked.replica,
            replicas=asked.replicas,
        )
        return await self.ask(look, r.CandidateRows, timeout_s)

    async def _take(self, chosen: Index, expired: Index, least: int) -> r.Delivered:
        take = msgspec.structs.replace(self.asked, min_rows=least, chosen=chosen, expired=expired)
        return await self.ask(take, r.Delivered, 0.0)


def check_sampler(sampler: Any) -> None:
    """Raises Misuse if the object is no sampler."""
    if isinstance(sampler, type) or not callable(getattr(sampler, "choose", None)):
        raise Misuse(f"a sampler is an object with a method choose(candidates, want), not {sampler!r}")


def _candidates(shown: r.CandidateRows) -> Candidates:
    return Candidates(
        group=shown.group,
        version=shown.version,
        age_s=np.frombuffer(shown.age_s, np.float64),
        group_rows=shown.group_rows,
        group_dropped=shown.group_dropped,
        lengths=shown.lengths,
        tags={name: _array(values) for name, values in shown.tags.items()},
        latest=shown.latest,
        closed=shown.closed,
        whole=shown.whole,
    )


def _array(values: Sequence[Any]) -> Any:
    made = np.empty(len(values), object)
    made[:] = values
    return made
