"""The parts of consuming a stream that need no state of it: loops over deliveries, and why a task has to wait."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from dataplane.client import arguments
from dataplane.client.delivery import LEFT, Delivery
from dataplane.diagnosis import recorder
from dataplane.errors import Closed, DataplaneError, Misuse, NotReady

if TYPE_CHECKING:
    from dataplane.client.streams import AsyncStream

log = logging.getLogger(__name__)

CONSUME_TIMEOUT_S = 600.0
"""The default timeout of a consume."""
LOG_WAIT_S = 10.0
"""After this time a log message says what a task waits for."""
_WHY_S = 1.0  # that a node may take to say why no rows are ready
_ANSWER_S = 0.1  # that an answer may take, however short the timeout

AtEnd: TypeAlias = Literal["warn", "raise", "ignore"]
"""What a loop over a stream does at the end if the task has not done all rows: issue a `UserWarning`, raise Closed,
or nothing."""


def check_at_end(at_end: str) -> None:
    """Raises Misuse."""
    if at_end not in get_args(AtEnd):
        raise Misuse(f"at_end is one of {', '.join(map(repr, get_args(AtEnd)))}, not {at_end!r}")


def ended(closed: Closed, at_end: AtEnd) -> None:
    """End a loop over a stream by this error. Warns or raises if the task has not done all rows."""
    if not (closed.dead or closed.expired) or at_end == "ignore":
        return
    if at_end == "raise":
        raise closed
    warnings.warn(f"{closed}; at_end='ignore' or 'raise' chooses what happens then", UserWarning, stacklevel=3)


class Consuming:
    """A consume under way: `await` it, or enter it with `async with`."""

    def __init__(self, consume: Callable[[], Any]) -> None:
        self._begin = consume
        self._delivery: Delivery | None = None

    def __await__(self) -> Generator[Any, None, Delivery]:
        return self._begin().__await__()  # type: ignore[no-any-return]

    async def __aenter__(self) -> Delivery:
        self._delivery = await self
        return self._delivery

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._delivery is not None:
            await self._delivery.__aexit__(kind)


class WaitLog:
    """Logs what a task waits for after `LOG_WAIT_S`; once for each task of a stream."""

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
        """The wait is over."""
        self._timer.cancel()
        if self._logging is not None:
            self._logging.cancel()


async def explained(stream: AsyncStream, error: NotReady, task: str, columns: Sequence[str]) -> NotReady:
    """The same error, with the reason why no rows are ready, if it is known."""
    why = await describe_wait(stream, task, columns) if error.waited_s > 0 else ""
    fields = {"stream": error.stream, "task": error.task, "waited_s": error.waited_s}
    return NotReady(f"{error}: {why}", **fields) if why else error


async def describe_wait(stream: AsyncStream, task: str, columns: Sequence[str]) -> str:
    """Why no rows with these columns are ready for a task; empty if the node does not answer."""
    try:
        async with asyncio.timeout(_WHY_S):
            figures = await stream.stats()
    except (DataplaneError, TimeoutError):
        return ""
    of, known = figures["task"][task], figures["columns"]
    said = [f"{of['pending']} rows are pending", f"{of['leased']} leased"]
    said += [f"{of['dead']} dead letters"] * (of["dead"] > 0)
    missing = [name for name in columns if name not in known]
    if missing and figures["rows"]:
        said.append(f"no row has {', '.join(map(repr, missing))}: the columns are {', '.join(known) or 'none yet'}")
    elif of["pending"]:
        said.append("those lack a column, or are fewer than min_rows or the sampler asks for")
    said += [f"group {each['group']!r} has {each['rows']} of {each['of']} rows" for each in of["incomplete"][:1]]
    return "; ".join(said)


async def deliveries(
    stream: AsyncStream,
    task: str,
    prefetch: int,
    timeout: float | None,
    at_end: AtEnd,
    how: Mapping[str, Any],
    fetch_ahead: Callable[[Delivery], object],
) -> AsyncIterator[Delivery]:
    """See `AsyncStream.deliveries`. `fetch_ahead` is called with each delivery as it is leased."""
    check_at_end(at_end)
    wait_s = max(arguments.seconds(timeout, CONSUME_TIMEOUT_S), _ANSWER_S)
    ahead: list[asyncio.Task[Delivery]] = []
    context = recorder.context()

    async def one() -> Delivery:
        while True:
            with suppress(NotReady):  # nobody may wait yet; a waiter keeps the time
                delivery = await stream.consume(task, timeout=CONSUME_TIMEOUT_S, **how)
                fetch_ahead(delivery)
                return delivery

    async def first() -> Delivery:
        began = recorder.awaits()
        await asyncio.wait(ahead[:1], timeout=wait_s)
        recorder.awaited(context.run(recorder.place), began)
        if ahead[0].done():
            return ahead.pop(0).result()
        what = f"no rows of stream {stream.name!r} became ready for task {task!r} in {wait_s:.1f} s"
        error = NotReady(what, stream=stream.name, task=task, waited_s=wait_s)
        raise await explained(stream, error, task, how.get("columns", ()))

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
            done = False
            try:
                yield delivery
                done = True
            finally:
                if not done and not delivery.settled:
                    with suppress(DataplaneError):
                        await delivery.nack(LEFT)
            if not delivery.settled:
                await delivery.ack()
    finally:
        for task_ahead in ahead:
            task_ahead.cancel()
        for outcome in await asyncio.gather(*ahead, return_exceptions=True):
            if isinstance(outcome, Delivery):
                with suppress(DataplaneError):
                    await outcome.unseen()
