"""Functions of consuming: loops over deliveries, consumes with a user's sampler, and the reasons why a task waits."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, get_args

import msgspec
import numpy as np

from dataplane.client import arguments
from dataplane.client.appender import TIMEOUT_S
from dataplane.client.arguments import names
from dataplane.client.delivery import LEFT, Delivery
from dataplane.client.warn import warn
from dataplane.clock import monotonic
from dataplane.diagnosis import recorder
from dataplane.errors import Closed, DataplaneError, LeaseExpired, Misuse, NotReady
from dataplane.stream import requests as r
from dataplane.stream.page import Index
from dataplane.stream.sampler import Candidates, Sampler, checked
from dataplane.wire import row_messages as rm

if TYPE_CHECKING:
    from dataplane.client.streams import AsyncStream


log = logging.getLogger(__name__)

C = TypeVar("C", bound=AbstractAsyncContextManager[Any])

CONSUME_TIMEOUT_S = 600.0
"""The default timeout of a consume."""
CONSUME_LEASE_S = 60.0
"""The default lease of a consume."""
LOG_WAIT_S = 10.0
"""Seconds of waiting after which the reason is logged."""
_WHY_S = 1.0  # the most time for the statistics from which the reason of a wait is determined
_ANSWER_S = 0.1  # the least time of a loop for an answer, even with a shorter timeout

loops = itertools.count(1)
"""The numbers of this process's loops over deliveries."""

AtEnd: TypeAlias = Literal["warn", "raise", "ignore"]
"""The action at the end of a loop if rows are dead letters, expired or were dropped: a warning, Closed, or none."""


def check_at_end(at_end: str) -> None:
    """Raise Misuse unless it is an `AtEnd`."""
    if at_end not in get_args(AtEnd):
        raise Misuse(f"at_end is one of {', '.join(map(repr, get_args(AtEnd)))}, not {at_end!r}")


def ended(closed: Closed, at_end: AtEnd) -> None:
    """End a loop over a stream that raised this error. Warns, or raises the error, if rows of the task are dead
    letters, expired or were dropped."""
    if not (closed.dead or closed.expired) or at_end == "ignore":
        return
    if at_end == "raise":
        raise closed
    warn(f"{closed}; at_end='ignore' or 'raise' chooses what happens then")


class Beginning(Generic[C]):
    """An operation that makes a context manager: `await` it, or enter its result by `async with`."""

    _made: C | None = None

    def _make(self) -> Coroutine[Any, Any, C]:
        raise NotImplementedError

    def __await__(self) -> Generator[Any, None, C]:
        return self._make().__await__()

    async def __aenter__(self) -> C:
        self._made = await self
        return self._made

    async def __aexit__(self, *error: Any) -> None:
        if self._made is not None:
            await self._made.__aexit__(*error)


class Consuming(Beginning[Delivery]):
    """A consume in progress."""

    def __init__(self, consume: Callable[[r.Consume], Coroutine[Any, Any, Delivery]], asked: r.Consume) -> None:
        self._consume = consume
        self._asked = asked

    def _make(self) -> Coroutine[Any, Any, Delivery]:
        return self._consume(self._asked)

    def in_loop(self, loop: int) -> Consuming:
        """The same consume for a loop, which settles its deliveries in turn. If the process dies, only the first of
        them counts for `max_deliveries`."""
        return Consuming(self._consume, msgspec.structs.replace(self._asked, loop=loop))


class WaitLog:
    """Logs why a task waits, `LOG_WAIT_S` after its creation. Logs once for each task of a stream object."""

    def __init__(self, stream: AsyncStream, task: str, columns: Sequence[str]) -> None:
        self._stream, self._task, self._columns = stream, task, columns
        self._logging: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(LOG_WAIT_S, self._begin)

    def _begin(self) -> None:
        if self._task in self._stream.logged_waits:
            return
        self._stream.logged_waits.add(self._task)
        self._logging = asyncio.get_running_loop().create_task(self._say())

    async def _say(self) -> None:
        why = await describe_wait(self._stream, self._task, self._columns)
        log.warning("task %r has waited for rows of stream %r for 10 s: %s", self._task, self._stream.name, why)

    def stop(self) -> None:
        """Stop the timer, or the log in progress."""
        self._timer.cancel()
        if self._logging is not None:
            self._logging.cancel()


async def explained(stream: AsyncStream, error: NotReady, task: str, how: Mapping[str, Any]) -> NotReady:
    """The same error, with the reason why no rows are ready, if it is known. `how`: the arguments of the consume."""
    columns = [*how.get("columns", ()), *names("needs", getattr(how.get("sampler"), "needs", ()))]
    why = await describe_wait(stream, task, columns, how.get("min_rows", 1)) if error.waited_s > 0 else ""
    fields = {"stream": error.stream, "task": error.task, "waited_s": error.waited_s}
    return NotReady(f"{error}: {why}", **fields) if why else error


async def not_ready(stream: AsyncStream, task: str, waited_s: float, how: Mapping[str, Any]) -> NotReady:
    """The `NotReady` of a loop over deliveries that has waited `waited_s` seconds, with the reason why no rows are
    ready. `how`: the arguments of the consume."""
    what = f"no rows of stream {stream.name!r} became ready for task {task!r} in {waited_s:.1f} s"
    return await explained(stream, NotReady(what, stream=stream.name, task=task, waited_s=waited_s), task, how)


async def describe_wait(stream: AsyncStream, task: str, columns: Sequence[str], min_rows: int = 1) -> str:
    """The reason, as text, why fewer than `min_rows` rows with these columns are ready for a task."""
    try:
        async with asyncio.timeout(_WHY_S):
            figures = await stream.stats()
    except TimeoutError:
        return "the stream's leader does not answer"
    except DataplaneError as error:
        return f"the stream's leader does not answer: {error}"
    of, known = figures["task"][task], figures["columns"]
    pending, begun = of["pending"], figures["unfinished"]
    held = [*map(_held, of["holders"])]
    said = [f"{_count(pending, 'row')} {'is' if pending == 1 else 'are'} pending"]
    said.append(f"{of['leased']} leased" + (f" ({', '.join(held)})" if held else ""))
    said += [f"dead letters: {of['dead']}"] * (of["dead"] > 0)
    said += [f"{'' if pending else 'waits for '}{_count(begun, 'row')} in progress, until finish()"] * (begun > 0)
    said += [f"{_count(figures['lost'], 'row')} lost with a host: stream.lost() returns their keys"] * bool(
        figures["lost"]
    )
    missing = [name for name in columns if name not in known]
    if missing and figures["rows"]:
        said.append(f"no row has {', '.join(map(repr, missing))}: the columns are {', '.join(known) or 'none yet'}")
    elif of["pending"] and of["pending"] < min_rows:
        said.append(f"min_rows is {min_rows}")
    elif of["pending"]:
        said.append(
            f"too few of those have {', '.join(map(repr, columns))}, or the sampler chooses fewer than {min_rows}"
        )
    if of["pending"] and not missing:
        said += [
            f"task {name!r} has {_count(its['dead'], 'dead letter')}, which may lack its columns:"
            f" stream.dead_letters({name!r})"
            for name, its in figures["task"].items()
            if name != task and its["dead"]
        ]
    for each in of["incomplete"][:1]:
        what = "a row without a group" if each["group"] is None else f"group {each['group']!r}"
        said.append(f"{what} has {each['rows']} of {each['of']} rows")
    return "; ".join(said)


def _held(by: Mapping[str, Any]) -> str:
    """The holder of leased rows, as text, from an entry of the task's `holders`."""
    if not by["holder"]:
        return f"{by['rows']} that {by['replica']} has not taken"
    replica = f", {by['replica']}," if by["replica"] else ""
    return f"{by['rows']} by {by['holder']}{replica} for {by['left_s']:.0f} s more"


def _count(count: int, what: str) -> str:
    return f"{count} {what if count == 1 else what + 's'}"


async def deliveries(
    stream: AsyncStream, task: str, prefetch: int, timeout: float | None, at_end: AtEnd, how: Mapping[str, Any]
) -> AsyncIterator[Delivery]:
    """Implements `AsyncStream.deliveries`."""
    check_at_end(at_end)
    wait_s = max(arguments.seconds(timeout, CONSUME_TIMEOUT_S), _ANSWER_S)
    ahead: list[asyncio.Task[Delivery]] = []
    body_s = math.inf
    loop = next(loops)
    context = recorder.context()

    async def one() -> Delivery:
        while True:
            with suppress(NotReady):  # a prefetch has no deadline; `first` checks that of the caller
                delivery = await stream.consume(task, timeout=CONSUME_TIMEOUT_S, **how).in_loop(loop)
                stream._getter.fetch_ahead(delivery.ref, TIMEOUT_S)
                return delivery

    async def first() -> Delivery | None:
        """The next delivery; None if its lease has ended. Its request stays in `ahead` until the lease was checked."""
        began = recorder.awaits()
        done, _ = await asyncio.wait(ahead, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        recorder.awaited(context.run(recorder.place), began)
        if not done:
            raise await not_ready(stream, task, wait_s, how)
        soonest = min(done, key=_granted)  # a later request may be granted before an earlier one
        delivery = soonest.result()
        since_s = min(delivery._since_s, body_s)  # if the body blocks the event loop, the reply is read late
        leased = not is_old(since_s, how) or await still_leased(delivery, how)
        ahead.remove(soonest)
        return delivery if leased else None

    try:
        while True:
            while len(ahead) < 1 + max(0, prefetch):
                ahead.append(asyncio.get_running_loop().create_task(one(), context=context))
            try:
                delivery = await first()
            except Closed as closed:
                if not closed.drained:
                    raise
                ended(closed, at_end)
                return
            if delivery is None:
                continue
            body_s = monotonic()
            try:
                yield delivery
            except BaseException:  # the loop was left
                if not delivery.settled:
                    with suppress(DataplaneError):
                        await delivery.nack(LEFT)
                raise
            if not delivery.settled:
                await delivery.ack()
    finally:
        await _give_back(ahead)


async def _give_back(ahead: Sequence[asyncio.Task[Delivery]]) -> None:
    """End these requests, and give back the deliveries that they got."""
    for request in ahead:
        request.cancel()
    for outcome in await asyncio.gather(*ahead, return_exceptions=True):
        if isinstance(outcome, Delivery):
            with suppress(DataplaneError):
                await outcome.unseen()


def _granted(request: asyncio.Task[Delivery]) -> float:
    """The number of the grant that a request got; infinite if it failed."""
    return math.inf if request.cancelled() or request.exception() is not None else request.result()._given.grant


def is_old(since_s: float, how: Mapping[str, Any]) -> bool:
    """Whether a tenth of the lease that began at `since_s` is over, so that it must be renewed before use."""
    return monotonic() - since_s >= float(how.get("lease", CONSUME_LEASE_S)) / 10


async def still_leased(delivery: Delivery, how: Mapping[str, Any]) -> bool:
    """Renew the lease of an unused delivery. Returns whether the rows are still leased. Raises LeaseExpired for a
    replica, which must not skip a delivery that others get."""
    try:
        await delivery.renew()
    except LeaseExpired:
        if how.get("replica") is not None:
            raise
        return False
    return True


_NONE: Index = np.empty(0, np.int64)
_FIRST = 1 << 14  # candidates of the first call of a sampler
_AGE_S = 0.5  # seconds between two calls of a sampler whose choice depends on age


class Sampling:
    """One consume with a user's sampler. `asked`: the request, without chosen rows."""

    def __init__(self, stream: AsyncStream, sampler: Sampler, asked: r.Consume) -> None:
        self.ask = stream.ask
        self.sampler = sampler
        self.asked = asked

    async def run(self, deadline_s: float) -> r.Delivered:
        """Lease rows once the sampler chooses enough, within `deadline_s` seconds. Raises NotReady, Closed, Misuse, and
        the errors of the sampler."""
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
            chosen, expired, least = _NONE, _NONE, 1  # without rows, another replica's grant is ready for this one
            if len(shown.rows):
                candidates = _candidates(shown)
                choice = checked(self._choose(candidates), candidates, asked.rows)
                if not choice.full and len(choice.rows) < asked.rows and not shown.whole and most < rm.MAX_ROWS:
                    most *= 4
                    continue
                seen, chosen, expired = shown.changes, shown.rows[choice.rows], shown.rows[choice.expired]
                least = asked.min_rows
                if choice.full or (shown.closed and len(shown.rows) == shown.left):  # no more rows can be chosen
                    least = len(chosen)
                elif shown.closed:
                    least = min(least, shown.left)
                if (len(chosen) < least or not len(chosen)) and not len(expired):
                    continue
            try:
                return await self._take(chosen, expired, max(1, least))
            except NotReady:
                if loop.time() >= until:
                    raise
                seen = -1  # other consumers leased these rows, or the replica's grant has ended: choose again

    def _choose(self, candidates: Candidates) -> Any:
        try:
            return self.sampler.choose(candidates, self.asked.rows)
        except KeyError as error:
            if error.args and (error.args[0] in candidates.lengths or error.args[0] in candidates.tags):
                raise
            if error.args and error.args[0] in getattr(self.sampler, "tags_read", ()):
                there = ", ".join(candidates.tags) or "none of its `tags_read`"
                raise Misuse(
                    f"no row that is ready has the tag {error}, which {type(self.sampler).__name__} reads; they have"
                    f" {there}"
                ) from error
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
    if isinstance(sampler, type):
        raise Misuse(f"the sampler is a class: pass an object of it, as {sampler.__name__}()")
    if not callable(getattr(sampler, "choose", None)):
        raise Misuse(f"a sampler has a method choose(candidates, want), as dataplane.Fifo() has; not {sampler!r}")


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
