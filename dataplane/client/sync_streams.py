"""The synchronous interface of streams: each call waits for the coroutine of the asynchronous one. It adds no logic."""

from __future__ import annotations

import os
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from dataplane.batch.batch import Batch
from dataplane.batch.put_options import Narrow, Objects
from dataplane.batch.ref import BatchRef
from dataplane.client import delivery, streams
from dataplane.client.loop_runner import LoopRunner
from dataplane.client.sync_appender import Appender
from dataplane.client.unfinished import LEASE_S, AsyncRow, Unfinished
from dataplane.stream.sampler import Sampler
from dataplane.stream.settings import Settings

if TYPE_CHECKING:
    from dataplane.client.history_follower import Follower
    from dataplane.client.recorder import Recording
    from dataplane.client.replay import Replay

T = TypeVar("T")


class Wait(Protocol):
    """Runs a coroutine; its result or its error."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T: ...


class Delivery:
    """See `dataplane.client.delivery.Delivery`; here each call waits."""

    def __init__(self, inner: delivery.Delivery, wait: Wait) -> None:
        self._inner = inner
        self._wait = wait
        self.ref = inner.ref
        self.groups = inner.groups
        self.versions = inner.versions
        self.tags = inner.tags

    def __len__(self) -> int:
        return len(self._inner)

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def keys(self) -> list[str]:
        """The keys of the rows."""
        return self._inner.keys

    @property
    def settled(self) -> bool:
        """Whether it was acked or given back."""
        return self._inner.settled

    def get(self, *columns: str, timeout: float = 60.0) -> Batch:
        """The rows, or these columns of them."""
        return self._wait(self._inner.get(*columns, timeout=timeout))

    def ack(self) -> None:
        """The task is done with the rows. Raises LeaseExpired, OutcomeUnknown."""
        self._wait(self._inner.ack())

    def nack(self, reason: str = "") -> None:
        """Give the rows back, to be delivered again; the node logs the reason if they are dead letters then. Raises
        LeaseExpired."""
        self._wait(self._inner.nack(reason))

    def renew(self) -> None:
        """Restart the lease. Raises LeaseExpired."""
        self._wait(self._inner.renew())

    def split(self, shards: int | None = None, *, equal: bool = True) -> list[BatchRef]:
        """The rows split over ranks."""
        return self._inner.split(shards, equal=equal)

    def rows_of(self, shards: int | None = None, *, equal: bool = True) -> list[Any]:
        """The rows of the delivery that `split` gives each rank."""
        return self._inner.rows_of(shards, equal=equal)

    def __enter__(self) -> Delivery:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None = None, _: object = None) -> None:
        self._wait(self._inner.__aexit__(kind, error))


class Taken(Sequence[BatchRef]):
    """See `dataplane.client.delivery.Taken`; here each call waits."""

    def __init__(self, inner: delivery.Taken, wait: Wait) -> None:
        self._inner = inner
        self._wait = wait
        self.delivery = Delivery(inner.delivery, wait)

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, rank: Any) -> Any:
        return self._inner[rank]

    def ack(self) -> None:
        """As `Delivery.ack`."""
        self._wait(self._inner.ack())

    def nack(self, reason: str = "") -> None:
        """As `Delivery.nack`."""
        self._wait(self._inner.nack(reason))

    def __enter__(self) -> Taken:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None = None, _: object = None) -> None:
        self._wait(self._inner.__aexit__(kind, error))


class Row:
    """See `dataplane.client.AsyncRow`; here each call waits. Any thread may use it."""

    def __init__(self, inner: AsyncRow, wait: Wait) -> None:
        self._inner = inner
        self._wait = wait
        self.key = inner.key
        self.group = inner.group
        self.tags = inner.tags
        self.spans = inner.spans
        self.tokens = inner.tokens

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def version(self) -> int:
        """The policy version of the last piece."""
        return self._inner.version

    @property
    def ended(self) -> bool:
        """Whether it was finished or abandoned here."""
        return self._inner.ended

    def append(self, columns: Any, *, version: int | None = None, timeout: float | None = None) -> None:
        """Append the next piece. Raises as `AsyncRow.append`."""
        self._wait(self._inner.append(columns, version=version, timeout=timeout))

    def finish(self, *, stale_share: float = 0.0, timeout: float | None = None) -> None:
        """End the row: tasks get it."""
        self._wait(self._inner.finish(stale_share=stale_share, timeout=timeout))

    def abandon(self) -> None:
        """Drop the row, with all that was appended to it."""
        self._wait(self._inner.abandon())

    def renew(self) -> None:
        """Restart the lease."""
        self._wait(self._inner.renew())

    def release(self) -> None:
        """Release the row for another process to resume."""
        self._wait(self._inner.release())

    def ref(self) -> BatchRef:
        """A reference to the row as it is now."""
        return self._wait(self._inner.ref())

    def get(self, *columns: str, timeout: float = 60.0) -> Batch:
        """The row as it is now, or these columns of it, read."""
        return self._wait(self._inner.get(*columns, timeout=timeout))

    def __enter__(self) -> Row:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._wait(self._inner.__aexit__(kind))


def opened(address: str, kind: str, name: str) -> Any:
    """An unpickled stream or table, on a plane of its own, which it keeps open."""
    from dataplane.client.sync import connect

    plane = connect(address)
    found = getattr(plane, kind)(name)
    found._plane = plane
    return found


class Stream:
    """See `dataplane.client.streams.AsyncStream`; here each call waits. Any thread may use it."""

    _plane: Any = None

    def __init__(self, inner: streams.AsyncStream, wait: Wait, turns: LoopRunner) -> None:
        self._inner = inner
        self._wait = wait
        self._turns = turns

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickled, it is the stream of this name, on a plane of its own to the same node."""
        return opened, (self._inner._connection.address, "stream", self.name)

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def name(self) -> str:
        """The name of the stream."""
        return self._inner.name

    @property
    def settings(self) -> Settings:
        """The tasks and limits of the stream."""
        return self._inner.settings

    def append(
        self,
        columns: Any,
        *,
        keys: Sequence[str] | None = None,
        group: Any = None,
        version: Any = 0,
        tags: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        narrow: Narrow = False,
        objects: Objects = "store",
    ) -> list[str]:
        """Append rows to the stream. Returns their keys. See `AsyncStream.append`."""
        if self._turns.free and not narrow and objects == "store":
            asked = self._inner.writes.appending(columns, keys, group, version, tags, timeout)
            if asked is not None:
                return self._turns.ask(asked)
        how: dict[str, Any] = {"keys": keys, "group": group, "version": version, "tags": tags}
        return self._wait(self._inner.append(columns, **how, timeout=timeout, narrow=narrow, objects=objects))

    def appender(
        self,
        *,
        max_rows: int = 256,
        max_delay: float = 0.005,
        timeout: float | None = None,
        narrow: Narrow = False,
    ) -> Appender:
        """Gathers rows of this process into blocks, each appended as one. See `AsyncStream.appender`."""
        how = {"max_rows": max_rows, "max_delay": max_delay, "timeout": timeout, "narrow": narrow}
        return Appender(self._inner.gathering(self._turns.begin, self._turns.soon, **how), self._wait)

    def extend(
        self,
        rows: BatchRef | Sequence[str],
        columns: Any,
        *,
        replace: bool = False,
        timeout: float | None = None,
        narrow: Narrow = False,
        objects: Objects = "store",
    ) -> None:
        """Add columns to rows of the stream. See `AsyncStream.extend`."""
        one = self._turns.free and not narrow and objects == "store"
        asked = self._inner.writes.extending(rows, columns, replace, timeout) if one else None
        if asked is None:
            how: dict[str, Any] = {"replace": replace, "timeout": timeout, "narrow": narrow, "objects": objects}
            self._wait(self._inner.extend(rows, columns, **how))
        else:
            self._turns.ask(asked)

    def consume(
        self,
        task: str,
        *,
        rows: int,
        columns: Sequence[str],
        min_rows: int = 1,
        sampler: Sampler | None = None,
        member: str | None = None,
        replica: int | None = None,
        replicas: int = 0,
        lease: float = 60.0,
        timeout: float | None = None,
    ) -> Delivery:
        """Up to `rows` rows for a task. See `AsyncStream.consume`."""

        async def consume() -> delivery.Delivery:
            return await self._inner.consume(
                task,
                rows=rows,
                columns=columns,
                min_rows=min_rows,
                sampler=sampler,
                member=member,
                replica=replica,
                replicas=replicas,
                lease=lease,
                timeout=timeout,
            )

        return Delivery(self._wait(consume()), self._wait)

    def deliveries(
        self, task: str, *, prefetch: int = 1, timeout: float | None = None, **how: Any
    ) -> Iterator[Delivery]:
        """Deliveries until the stream is closed and this task has done all of it. See `AsyncStream.deliveries`."""
        several = self._inner.deliveries(task, prefetch=prefetch, timeout=timeout, **how)

        async def following() -> delivery.Delivery | None:
            return await anext(several, None)

        async def close() -> None:
            await several.aclose()  # type: ignore[attr-defined]

        try:
            while (found := self._wait(following())) is not None:
                yield Delivery(found, self._wait)
        finally:
            self._wait(close())

    def take(self, task: str, **how: Any) -> Taken:
        """The rows of one synchronous step, a reference a rank. See `AsyncStream.take`."""
        return Taken(self._wait(self._inner.take(task, **how)), self._wait)

    def drop_rows(self, rows: BatchRef | Sequence[str] = (), *, groups: Sequence[str | int] = ()) -> None:
        """Remove these rows, and those of these groups, from all tasks. See `AsyncStream.drop_rows`."""
        self._wait(self._inner.drop_rows(rows, groups=groups))

    def dead_letters(self, task: str, *, most: int = 1024) -> delivery.DeadLetters:
        """The rows that were not delivered again. See `AsyncStream.dead_letters`."""
        return self._wait(self._inner.dead_letters(task, most=most))

    def lost(self, task: str | None = None) -> delivery.LostRows:
        """Rows whose columns died with their hosts, each reported once. See `AsyncStream.lost`."""
        return self._wait(self._inner.lost(task))

    def checkpoint(self, path: str | os.PathLike[str], *, timeout: float = 60.0) -> None:
        """Write the current state of the stream to a file. See `AsyncStream.checkpoint`."""
        self._wait(self._inner.checkpoint(path, timeout=timeout))

    def begin(
        self,
        key: str | None = None,
        *,
        group: str | int | None = None,
        version: int = 0,
        tags: Mapping[str, Any] | None = None,
        columns: Mapping[str, Any] | None = None,
        tokens: str = "response_ids",
        lease: float = LEASE_S,
        timeout: float | None = None,
    ) -> Row:
        """Begin an unfinished row, which is appended piece by piece: see `dataplane.client.unfinished.begin`."""
        said: dict[str, Any] = {"group": group, "version": version, "tags": tags, "columns": columns}
        begun = self._inner.begin(key, **said, tokens=tokens, lease=lease, timeout=timeout)
        return Row(self._wait(begun), self._wait)

    def unfinished(self) -> list[Unfinished]:
        """The unfinished rows."""
        return self._wait(self._inner.unfinished())

    def resume(self, key: str | None = None, *, lease: float = LEASE_S) -> Row | None:
        """Continue an unfinished row without a holder. Raises LeaseExpired, Misuse."""
        row = self._wait(self._inner.resume(key, lease=lease))
        return None if row is None else Row(row, self._wait)

    def record(self, directory: str | os.PathLike[str], columns: Sequence[str] | None = None, **how: Any) -> Recording:
        """Begin to record rows as they are done, each once, to a directory. See `AsyncStream.record`."""
        from dataplane.client import recorder  # as for checkpoints

        return recorder.record(self._inner, directory, columns, **how)

    @property
    def follower(self) -> Follower | None:
        """The recorder of the stream's rows in a history, if `plane.stream` was given one."""
        return self._inner.follower

    @property
    def replay(self) -> Replay | None:
        """The replay that fills the stream, if `plane.replay` created it."""
        return self._inner.replay

    def stats(self) -> Mapping[str, Any]:
        """The statistics of the stream."""
        return self._wait(self._inner.stats())

    def close(self) -> None:
        """End the appends; consumers continue until all is done. Idempotent."""
        self._wait(self._inner.close())

    def drop(self) -> None:
        """Free everything, delivered or not. Waiting calls raise Closed."""
        self._wait(self._inner.drop())
