"""A stream, as a process uses it: rows appended, extended, consumed and acknowledged.

What always holds: rows are admitted before their columns are written, so that a stream that is full keeps nobody's
memory; what was written for rows that did not come is freed, also when this process dies in between.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.batch.field import is_text
from dataplane.batch.ref import BatchRef
from dataplane.client.connection import Connection
from dataplane.client.delivery import Delivery, Taken
from dataplane.client.getting import Getter
from dataplane.client.writer import Writer
from dataplane.config import parse_size
from dataplane.errors import Closed, DataplaneError, Misuse, NotReady, SchemaMismatch
from dataplane.stream.home import Settings
from dataplane.stream.keys import unnamed
from dataplane.stream.sampler import BuiltIn, Candidates, Fifo, Sampler, TokenBalanced, checked
from dataplane.wire import messages as m

Index = npt.NDArray[np.int64]

TIMEOUT_S = 60.0
"""The deadline, in seconds, of an append or extend that names none."""

CONSUME_TIMEOUT_S = 600.0
"""The deadline of a consume that names none."""

_SCANNED = 1 << 14  # rows that a user's own sampler is shown first
_FIRST_LEASE_S = 60.0
_TAGS = (str, int, float, bool, type(None))


class AsyncStream:
    """A stream of the plane's node. Made by `plane.stream`; any number of processes may use it at once."""

    def __init__(self, connection: Connection, writer: Writer, getter: Getter, name: str, opened: m.Opened) -> None:
        self.name = name
        self._connection = connection
        self._writer = writer
        self._getter = getter
        self._token = opened.stream
        self.settings = opened.settings
        """The tasks and limits that the stream was made with."""
        self._staging = f"{m.STAGED}{secrets.token_hex(8)}"
        self._appends = itertools.count(1)

    def __repr__(self) -> str:
        return f"<stream {self.name!r} with the tasks {', '.join(self.settings.tasks)}>"

    # producing

    async def append(
        self,
        columns: Any,
        *,
        keys: Sequence[str] | None = None,
        group: Any = None,
        version: Any = 0,
        tags: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> list[str]:
        """New rows of the stream; their keys.

        columns: as for `plane.put`, or a reference to what was put, which belongs to the stream from then on.
        keys: a text a row, not beginning with "~"; those of rows that have none are made.
        group: a text or integer a row (or one for all): rows of one prompt. None: each row by itself.
        version: the policy version that made the rows, an integer for all or one a row.
        tags: by name, a text, number or flag a row (or one for all), for samplers.
        timeout: seconds to wait for room in the stream and the node.

        The same append made again, with the same keys, succeeds without doing anything. Raises Backpressure (the stream
        is over its limits, and says which task it waits for), LimitExceeded (it can never fit), Closed, SchemaMismatch,
        Misuse (a key that is there, other than by this very append).
        """
        deadline_s = _seconds(timeout, TIMEOUT_S)
        planned = None if isinstance(columns, BatchRef) else await self._writer.plan(columns, ())
        rows = len(columns) if planned is None else planned.rows
        if rows < 1:
            raise SchemaMismatch("an append has at least one row", expected="rows", found="none")
        named = _texts("keys", keys, rows)
        groups = _plain("group", group, rows, (str, int)) if group is not None else []
        versions = np.asarray(_plain("version", version, rows, (int,)), np.int64)
        tagged = {name: _plain(f"tag {name!r}", values, rows, _TAGS) for name, values in (tags or {}).items()}
        nbytes = columns.stored_nbytes if planned is None else sum(c.values.nbytes for c in planned.columns)
        admit = m.Admit(self._connection.next_id(), self._token, rows, nbytes, int(versions.max()), deadline_s)
        ticket = (await self._connection.request(admit, m.Admitted, deadline_s)).ticket
        staged = "" if planned is None else f"{self._staging}-{next(self._appends)}"
        try:
            if planned is None:
                ref, lengths = columns, await self._lengths_of(columns)
            else:
                ref = await self._writer.write(planned, staged, deadline_s)
                lengths = {c.name: c.lengths.tobytes() for c in planned.columns if c.lengths is not None}
            request = m.Append(
                self._connection.next_id(),
                self._token,
                ticket,
                staged,
                ref.encode(),
                named,
                groups,
                versions.tobytes(),
                tagged,
                lengths,
            )
            reply = await self._connection.request(request, m.Appended, 0.0)
        except BaseException:
            self._unstage(staged, ticket)
            raise
        return named or unnamed(range(reply.first, reply.first + rows))

    def _unstage(self, staged: str, ticket: int = 0) -> None:
        """What was staged is not appended. Says so without waiting; the connection's end says it too."""
        with suppress(DataplaneError):
            self._connection.check()
            if ticket:
                self._connection.tell(m.GiveBack(self._token, ticket))
            if staged:
                self._connection.tell(m.Free(self._connection.next_id(), [], [], staged))

    async def _lengths_of(self, ref: BatchRef) -> dict[str, bytes]:
        measured = [name for name, field in ref.schema.items() if field.kind in ("ragged", "text", "bytes")]
        if not measured:
            return {}
        batch = await self._getter.get(ref.select(*measured), TIMEOUT_S)
        return {name: np.asarray(batch[name].lengths()).tobytes() for name in measured}

    async def extend(
        self, rows: BatchRef | Sequence[str], columns: Any, *, replace: bool = False, timeout: float | None = None
    ) -> None:
        """More columns for rows of the stream, in any order of rows and stages.

        rows: a reference that the stream delivered, or any rows picked from such, or keys. columns: as for `append`,
        a row for each. A column that a row has already is refused, unless `replace`. Raises Misuse (a row that is not
        there, one named twice, a column that is there), SchemaMismatch, Backpressure (no room in the node).
        """
        deadline_s = _seconds(timeout, TIMEOUT_S)
        numbers, keys = self._named(rows)
        staged, lengths = "", {}
        if isinstance(columns, BatchRef):
            ref, lengths = columns, await self._lengths_of(columns)
        else:
            planned = await self._writer.plan(columns, ())
            if planned.rows != len(rows):
                raise SchemaMismatch(
                    f"{planned.rows} rows of new columns for {len(rows)} rows",
                    column=planned.columns[0].name,
                    expected=f"{len(rows)} rows",
                    found=f"{planned.rows} rows",
                )
            if not planned.rows:
                return
            staged = f"{self._staging}-{next(self._appends)}"
        try:
            if staged:
                ref = await self._writer.write(planned, staged, deadline_s)
                lengths = {c.name: c.lengths.tobytes() for c in planned.columns if c.lengths is not None}
            encoded = ref.encode()
            request = m.Extend(
                self._connection.next_id(), self._token, staged, encoded, numbers, keys, lengths, replace
            )
            await self._connection.request(request, m.Done, 0.0)
        except BaseException:
            self._unstage(staged)
            raise

    def _named(self, rows: BatchRef | Sequence[str]) -> tuple[bytes, list[str]]:
        """Rows by number, or by key."""
        if isinstance(rows, BatchRef):
            origin = rows.origin()
            if origin is None and len(rows):
                raise Misuse("these rows were not delivered by a stream; pass a delivery's ref, or keys")
            if origin is not None and origin[0] != self._token:
                raise Misuse(f"these rows were delivered by another stream than {self.name!r}")
            return (b"" if origin is None else origin[1].tobytes()), []
        return b"", _texts("keys", rows, len(rows))

    # consuming

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
        lease: float = _FIRST_LEASE_S,
        timeout: float | None = None,
    ) -> Consuming:
        """Up to `rows` rows that have all of `columns`, as soon as there are `min_rows`; to be awaited, or entered.

        sampler: which of the rows that are ready; first come, first served where it is None. Any object with `choose`
            (`dataplane.Sampler`) will do; one of the user's own runs in this process.
        member, replica, replicas: ranks that must see the same rows name the same member and each its replica, 0 to
            replicas - 1. Each gets each delivery once, in the same order; one that was restarted gets again what it
            had not acked.
        lease: seconds until the rows go to others if they are neither acked nor renewed.
        timeout: seconds to wait, 600 if None.

        Raises NotReady at the deadline, Closed once the stream is closed and this task has done all of it, Misuse.
        """
        return Consuming(
            lambda: self._consume(task, rows, columns, min_rows, sampler, member, replica, replicas, lease, timeout)
        )

    async def _consume(
        self,
        task: str,
        rows: int,
        columns: Sequence[str],
        min_rows: int,
        sampler: Sampler | None,
        member: str | None,
        replica: int | None,
        replicas: int,
        lease: float,
        timeout: float | None,
    ) -> Delivery:
        _check_asked(task, columns, member or "", rows=rows, min_rows=min_rows, replica=replica, replicas=replicas)
        deadline_s, lease = _seconds(timeout, CONSUME_TIMEOUT_S), _seconds(lease, _FIRST_LEASE_S)
        sampler = Fifo() if sampler is None else sampler

        def request(chosen: Index | None = None, expired: Index | None = None, timeout_s: float = 0.0) -> m.Consume:
            return m.Consume(
                self._connection.next_id(),
                self._token,
                task,
                rows,
                min_rows,
                list(columns),
                sampler if chosen is None else None,  # type: ignore[arg-type]
                b"" if chosen is None else chosen.tobytes(),
                b"" if expired is None else expired.tobytes(),
                member or "",
                replica,
                replicas,
                float(lease),
                timeout_s,
            )

        if isinstance(sampler, BuiltIn):
            asked = request(timeout_s=deadline_s)
            reply = await self._connection.request(asked, m.Delivered, deadline_s)
        else:
            reply = await self._sample(sampler, task, columns, rows, min_rows, deadline_s, request)
        balance = (sampler.column, sampler.shards) if isinstance(sampler, TokenBalanced) else None
        return Delivery(self._connection, self._getter, reply, replica, balance)

    async def _sample(
        self,
        sampler: Sampler,
        task: str,
        columns: Sequence[str],
        rows: int,
        min_rows: int,
        deadline_s: float,
        request: Callable[..., m.Consume],
    ) -> m.Delivered:
        """Choose here, by a sampler of the user's own, among what the home shows; again when others were quicker."""
        loop = asyncio.get_running_loop()
        until, seen, most = loop.time() + deadline_s, -1, max(_SCANNED, rows)
        needs, tags_read = list(getattr(sampler, "needs", ())), list(getattr(sampler, "tags_read", ()))
        while True:
            left = max(0.0, until - loop.time())
            look = m.Look(
                self._connection.next_id(), self._token, task, list(columns), needs, tags_read, most, seen, left
            )
            shown = await self._connection.request(look, m.Shown, left)
            candidates = _candidates(shown)
            choice = checked(sampler.choose(candidates, rows), candidates, rows)
            numbers = np.frombuffer(shown.rows, np.int64)
            if len(choice.rows) < rows and not shown.whole and most < m.MAX_ROWS:
                most *= 4
                continue
            seen = shown.changes
            if len(choice.rows) < min_rows and not len(choice.expired):
                continue
            try:
                asked = request(numbers[choice.rows], numbers[choice.expired])
                return await self._connection.request(asked, m.Delivered, 0.0)
            except NotReady:
                if loop.time() >= until:
                    raise
                seen = -1  # others took these rows, which changes nothing for those that are left

    async def deliveries(
        self, task: str, *, prefetch: int = 1, timeout: float | None = None, **how: Any
    ) -> AsyncIterator[Delivery]:
        """Deliveries until the stream is closed and this task has done all of it; arguments as for `consume`.

        Each is acked when the next is asked for; left by `break` or an exception, it is given back unless it was
        acked. `prefetch`: how many more are asked for meanwhile; their leases run.
        """
        ahead: list[asyncio.Task[Delivery]] = []

        async def one() -> Delivery:
            return await self.consume(task, timeout=timeout, **how)

        try:
            while True:
                while len(ahead) < 1 + max(0, prefetch):
                    ahead.append(asyncio.get_running_loop().create_task(one()))
                try:
                    delivery = await ahead.pop(0)
                except Closed:
                    self._connection.check()
                    return
                done = False
                try:
                    yield delivery
                    done = True
                finally:
                    if not done and not delivery.settled:
                        with suppress(DataplaneError):
                            await delivery.nack()
                await delivery.ack()
        finally:
            for task_ahead in ahead:
                task_ahead.cancel()
            for outcome in await asyncio.gather(*ahead, return_exceptions=True):
                if isinstance(outcome, Delivery):
                    with suppress(DataplaneError):
                        await outcome.unseen()

    async def take(
        self,
        task: str,
        *,
        rows: int,
        shards: int,
        columns: Sequence[str],
        sampler: Sampler | None = None,
        min_rows: int | None = None,
        lease: float = 3600.0,
        timeout: float | None = None,
        member: str | None = None,
    ) -> Taken:
        """The rows of one synchronous step, a reference a rank, from what the stream knows of them: no column is read.

        All of `rows`, unless `min_rows` are fewer. Ranks get rows by tokens where the sampler is `TokenBalanced`. To be
        acked as a whole. Raises as `consume`.
        """
        at_least = rows if min_rows is None else min_rows
        delivery = await self.consume(
            task,
            rows=rows,
            columns=columns,
            min_rows=at_least,
            sampler=sampler,
            member=member,
            lease=lease,
            timeout=timeout,
        )
        return Taken(delivery, delivery.split(shards))

    # the rest

    async def drop_rows(self, rows: BatchRef | Sequence[str]) -> None:
        """No task is to see these rows any more, and groups are complete without them. Who holds them may finish."""
        numbers, keys = self._named(rows)
        if numbers or keys:
            request = m.DropRows(self._connection.next_id(), self._token, numbers, keys)
            await self._connection.request(request, m.Done, 0.0)

    async def dead_letters(self, task: str) -> DeadLetters:
        """The rows that this task gave back, or let its lease run out on, `max_deliveries` times. They stay until
        they are dropped."""
        reply = await self._connection.request(m.Dead(self._connection.next_id(), self._token, task), m.Delivered, 0.0)
        return DeadLetters(reply)

    async def stats(self) -> Mapping[str, Any]:
        """The stream's figures now: see `docs/operations.md`."""
        reply = await self._connection.request(m.Streams(self._connection.next_id()), m.Figures, 0.0)
        if self.name not in reply.values:
            raise Closed("the stream was dropped")
        figures: Mapping[str, Any] = reply.values[self.name]
        return figures

    async def close(self) -> None:
        """Nothing is appended any more; consumers go on until all is done. Idempotent."""
        await self._connection.request(m.End(self._connection.next_id(), self._token, False), m.Done, 0.0)

    async def drop(self) -> None:
        """Free everything, delivered or not. Whoever waits is told `Closed`."""
        await self._connection.request(m.End(self._connection.next_id(), self._token, True), m.Done, 0.0)


class DeadLetters:
    """Rows that were given up on. `ref` has the columns that all of them have; None where there are no rows."""

    def __init__(self, reply: m.Delivered) -> None:
        self.ref = BatchRef.decode(reply.ref) if reply.ref else None
        origin = None if self.ref is None else self.ref.origin()
        self.keys = reply.keys or ([] if origin is None else unnamed(origin[1].tolist()))
        self.groups = reply.groups
        self.versions = reply.versions
        self.tags = reply.tags

    def __len__(self) -> int:
        return len(self.keys)


class Consuming:
    """A delivery that is being waited for: `await` it, or enter it with `async with`."""

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


def settings(
    tasks: Sequence[str] | None,
    max_bytes: int | str | None,
    max_rows: int | None,
    max_lag: int | None,
    max_deliveries: int,
) -> Settings | None:
    """What a stream is to be made with; None where only one that is there is wanted. Raises Misuse."""
    if tasks is None:
        if (max_bytes, max_rows, max_lag) != (None, None, None):
            raise Misuse("name the tasks too: a stream is made with tasks and limits, and found by its name alone")
        return None
    if isinstance(tasks, str):
        raise Misuse(f"tasks is a list of names, not the text {tasks!r}")
    return Settings(
        tuple(tasks),
        0 if max_bytes is None else parse_size(max_bytes),
        0 if max_rows is None else int(max_rows),
        -1 if max_lag is None else int(max_lag),
        max_deliveries,
    )


def _candidates(shown: m.Shown) -> Candidates:
    return Candidates(
        group=np.frombuffer(shown.group, np.int64),
        version=np.frombuffer(shown.version, np.int64),
        age_s=np.frombuffer(shown.age_s, np.float64),
        group_rows=np.frombuffer(shown.group_rows, np.int64),
        group_dropped=np.frombuffer(shown.group_dropped, np.int64),
        lengths={name: np.frombuffer(values, np.int64) for name, values in shown.lengths.items()},
        tags={name: np.array(values, object) for name, values in shown.tags.items()},
        latest=shown.latest,
        closed=shown.closed,
        whole=shown.whole,
    )


def _each(what: str, values: Any, rows: int) -> list[Any]:
    """One value a row: as given, or the same for all. Raises Misuse."""
    if isinstance(values, str | int | float | np.generic):
        return [values.item() if isinstance(values, np.generic) else values] * rows
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, Iterable):
        raise Misuse(f"{what} is one value a row or one for all, not {type(values).__name__}")
    listed = [value.item() if isinstance(value, np.generic) else value for value in values]
    if len(listed) != rows:
        raise Misuse(f"{len(listed)} values of {what} for {rows} rows")
    return listed


def _plain(what: str, values: Any, rows: int, kinds: tuple[type, ...]) -> list[Any]:
    """One value a row, each of one of these kinds and such that a message can hold it. Raises Misuse."""
    listed = _each(what, values, rows)
    found = set(map(type, listed))
    if not found <= set(kinds):
        odd = next(value for value in listed if type(value) not in kinds)
        named = ", ".join(kind.__name__ for kind in kinds)
        raise Misuse(f"{what} is of {named}, one a row or one for all, not {odd!r}")
    for kind, fits in ((int, _is_int64), (str, is_text)):
        for value in listed if kind in found and kind in kinds else ():
            if type(value) is kind and not fits(value):
                raise Misuse(f"{what} can not be {value!r}: it fits no message")
    return listed


def _is_int64(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _seconds(timeout: Any, default: float) -> float:
    """A timeout as it is sent: what is below zero has passed already. Raises Misuse."""
    if timeout is None:
        return default
    if isinstance(timeout, bool) or not isinstance(timeout, int | float | np.number) or math.isnan(timeout):
        raise Misuse(f"a timeout or lease is seconds, not {timeout!r}")
    return max(0.0, float(timeout))


def _check_asked(task: Any, columns: Any, member: Any, **numbers: Any) -> None:
    """Raises Misuse for what no message can hold, or the node would take for nonsense."""
    if isinstance(columns, str):
        raise Misuse(f"columns is a list of names, not the text {columns!r}")
    for text in (task, member, *columns):
        if not is_text(text):
            raise Misuse(f"tasks, members and columns are named by texts, not {text!r}")
    for name, value in numbers.items():
        if not _is_int64(value) and not (name == "replica" and value is None):
            raise Misuse(f"{name} is a whole number, not {value!r}")


def _texts(what: str, values: Sequence[str] | None, rows: int) -> list[str]:
    if values is None:
        return []
    listed = _each(what, values if not isinstance(values, str) else [values], rows)
    for value in listed:
        if not is_text(value):
            raise Misuse(f"{what} are texts, one a row, not {value!r}")
    return listed
