"""A stream, as a process uses it: append, extend, consume and acknowledge rows.

Invariants: rows are admitted before their columns are written, so a full stream does not fill memory; columns of
rows that were refused are freed, also if this process dies in between.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets
import struct
import time
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import msgspec
import numpy as np
import xxhash

from dataplane.batch.batch import Batch
from dataplane.batch.dedupe import Each, digests
from dataplane.batch.field import MEASURED
from dataplane.batch.put_options import Narrow, Objects, refuses
from dataplane.batch.put_plan import Plan, columns_of
from dataplane.batch.ref import BatchRef
from dataplane.batch.small_columns import laid_out
from dataplane.client import arguments, flows, unfinished
from dataplane.client.appender import TIMEOUT_S, AsyncAppender, Begin
from dataplane.client.client_sampler import Sampling, check_sampler
from dataplane.client.connection import Connection, Exchange
from dataplane.client.delivery import LEFT, DeadLetters, Delivery, Taken
from dataplane.client.reader import Getter
from dataplane.client.unfinished import LEASE_S, AsyncRow, Unfinished
from dataplane.client.writer import Writer
from dataplane.clock import Deadline
from dataplane.diagnosis import recorder
from dataplane.errors import Closed, DataplaneError, Misuse, NotReady, ProtocolMismatch, SchemaMismatch
from dataplane.observe.ring import CODE
from dataplane.stream import requests as r
from dataplane.stream.keys import unnamed
from dataplane.stream.pieces import Listed, Piece
from dataplane.stream.sampler import BuiltIn, Fifo, Sampler, TokenBalanced
from dataplane.wire import messages as m

if TYPE_CHECKING:
    from dataplane.client.history_follower import Follower
    from dataplane.client.recorder import Recording
    from dataplane.client.replay import Replay

log = logging.getLogger(__name__)

CONSUME_TIMEOUT_S = 600.0
"""The default timeout of a consume."""

_FIRST_LEASE_S = 60.0
_APPEND, _CONSUME = CODE["append"], CODE["consume"]
LOG_WAIT_S = 10.0
"""After this time a log message says what a task waits for."""
_WHY_S = 1.0  # that a node may take to say why no rows are ready
_ANSWER_S = 0.1  # that an answer may take, however short the timeout
_HANDED = 1 << 12  # shards of one append that go with this process if it dies on the way
_BUILT_IN = get_args(BuiltIn)


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


class LostRow(NamedTuple):
    """A lost row: its key, its group (None for none), and the policy version that made it."""

    key: str
    group: str | int | None
    version: int


class LostRows(list[LostRow]):
    """Lost rows. `unnamed`: how many more were lost, by the node of their producers, in hex."""

    def __init__(self, rows: Iterable[LostRow], unnamed: Mapping[str, int]) -> None:
        super().__init__(rows)
        self.unnamed = dict(unnamed)


class _WaitLog:
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
        why = await self._stream.describe_wait(self._task, self._columns)
        log.warning("task %r has waited for rows of stream %r for 10 s: %s", self._task, self._stream.name, why)

    def stop(self) -> None:
        """The wait is over."""
        self._timer.cancel()
        if self._logging is not None:
            self._logging.cancel()


A = TypeVar("A", bound=r.Result)

_Named: TypeAlias = tuple[bytes, bytes, list[str]]


class _Said(NamedTuple):
    """The metadata of an append, as messages hold it."""

    keys: list[str]
    digest: bytes
    groups: list[Any]
    versions: bytes
    tags: dict[str, list[Any]]
    begin: tuple[int, float, str] | None = None

    @classmethod
    def of(cls, keys: list[str], digest: bytes, group: Any, version: Any, tags: Any, rows: int) -> _Said:
        """The metadata of `rows` rows. Raises Misuse."""
        groups = arguments.plain("group", group, rows, (str, int)) if group is not None else []
        versions = arguments.plain("version", version, rows, (int,))
        packed = struct.pack(f"<{rows}q", *versions)
        return cls(keys, digest, groups, packed, arguments.tagged(tags, rows) if tags is not None else {})


class AsyncStream:
    """A stream of the node of this plane. Created by `plane.stream`; any number of processes may use it at once."""

    follower: Follower | None = None
    """What records the stream's rows in a history, if `plane.stream` was given one."""
    replay: Replay | None = None
    """What fills the stream from a recording, if `plane.replay` made it."""

    def __init__(self, connection: Connection, writer: Writer, getter: Getter, name: str, opened: m.Opened) -> None:
        self.name = name
        self._connection = connection
        self._writer = writer
        self._getter = getter
        self._token = opened.stream
        self._mark = opened.mark
        self.settings = opened.settings
        """The tasks and limits that the stream was made with."""
        self._staging = f"{m.STAGED}{secrets.token_hex(8)}"
        self._appends = itertools.count(1)
        self.logged_waits: set[str] = set()
        """The tasks of which the log has said what they waited for."""
        self._appending = 0  # calls under way, other than those that were gathered
        self._gathered = self.appender(max_rows=m.MAX_ROWS, max_delay=0)

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
        narrow: Narrow = False,
        objects: Objects = "store",
    ) -> list[str]:
        """Append rows. Returns their keys.

        columns: as for `plane.put`, or a reference to what was put. The stream owns a reference from then on: it is
            freed when no task needs it any more, and stays until then even if its rows are freed elsewhere.
        keys: a text for each row, which does not begin with "~". Rows without keys get generated ones.
        group: a text or integer for each row, or one for all: the rows of one prompt, at most `group_size` of the
            stream. None: each row is in a group of its own.
        version: the policy version that made the rows, an integer for each row or one for all.
        tags: for each name a text, number or flag for each row, or one for all. Samplers read them.
        timeout: seconds to wait for room in the stream and the node.
        narrow: as for `plane.put`: integers are stored in the narrowest dtype that holds those of this append.
        objects: as for `plane.put`: "refuse" raises SchemaMismatch if a column would be stored as objects.

        An append that is repeated with the same keys and content succeeds and changes nothing. Small appends without
        keys that run at the same time are merged (`client.appender`). Raises Backpressure (the stream is full; the
        error names the task that it waits for), LimitExceeded (the rows can never fit), Closed, SchemaMismatch,
        Misuse (a key exists and this append is no repetition, or a group would exceed `group_size`), OutcomeUnknown
        (no answer came: the rows may be appended, now or later; repeated with the same keys, they are appended once).
        """
        if objects != "store" and refuses(objects):
            columns = await self._writer.without_objects(columns)
        if narrow:
            how: dict[str, Any] = {"keys": keys, "group": group, "version": version, "tags": tags}
            return await self.append_block(columns, **how, timeout=timeout, narrow=narrow)
        if self._appending and keys is None and timeout is None:  # who waits less is not to wait for others
            sent = self._gathered.offer_small(columns, group, version, tags)
            if sent is not None:
                try:
                    return await sent
                except asyncio.CancelledError:
                    sent.withdraw()
                    raise
        self._appending += 1
        try:
            asked = self.appending(columns, keys, group, version, tags, timeout)
            if asked is not None:
                return await self._connection.exchange(asked)
            return await self.append_block(columns, keys=keys, group=group, version=version, tags=tags, timeout=timeout)
        finally:
            self._appending -= 1

    def appending(
        self, columns: Any, keys: Any, group: Any, version: Any, tags: Any, timeout: Any
    ) -> Exchange[m.Appended, list[str]] | None:
        """The single request of a small, simple append without keys; None for any other. Raises as `append`."""
        if keys is not None or self.settings.replicas > 1:
            return None
        laid = laid_out(columns, m.MAX_INLINE)
        if laid is None:
            return None
        if self._appending > 1:  # more like these are expected, which go together
            self._gathered.learn(list(columns_of(columns)))
        carried = m.Inline(laid.payload, laid.layout, [nbytes for *_, nbytes in laid.columns])
        deadline = Deadline.after(arguments.seconds(timeout, TIMEOUT_S))
        said = _Said.of([], b"", group, version, tags, laid.rows)
        return self._carrying(carried, laid.lengths, said, deadline)

    def _carrying(
        self, carried: m.Inline, lengths: dict[str, bytes], said: _Said, deadline: Deadline
    ) -> Exchange[m.Appended, list[str]]:
        """An append whose columns are in the message."""
        timeout_s = deadline.remaining_s
        request = m.AppendInline(
            self._connection.next_id(),
            self._token,
            carried,
            said.keys,
            said.digest,
            said.groups,
            said.versions,
            said.tags,
            lengths,
            timeout_s,
            said.begin,
        )

        def finish(reply: m.Appended) -> list[str]:
            flows.appended(self._connection, self._mark, reply, said.keys, len(said.versions) // 8)
            return said.keys or self._names(reply, len(said.versions) // 8)

        return Exchange(self._connection, request, m.Appended, timeout_s, finish, admits=True)

    def _names(self, reply: m.Appended, rows: int) -> list[str]:
        """The generated keys of `rows` rows."""
        return unnamed(self._mark, range(reply.first, reply.first + rows))

    async def append_block(
        self,
        columns: Any,
        *,
        keys: Sequence[str] | None = None,
        group: Any = None,
        version: Any = 0,
        tags: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        narrow: Narrow = False,
        begin: tuple[int, float, str] | None = None,
    ) -> list[str]:
        """As `append`, never merged with others. `begin`: for one row in progress, see `client.unfinished`."""
        deadline, began = Deadline.after(arguments.seconds(timeout, TIMEOUT_S)), time.monotonic_ns()
        if narrow:
            columns = await self._writer.narrowed(columns, narrow)
        planned = None if isinstance(columns, BatchRef) else await self._writer.plan(columns, ())
        rows = len(columns) if planned is None else planned.rows
        if rows < 1:
            raise SchemaMismatch("an append has at least one row", expected="rows", found="none")
        said = _Said.of(arguments.keys_of(keys, rows), b"", group, version, tags, rows)
        named, groups, versions, tagged = said.keys, said.groups, np.frombuffer(said.versions, np.int64), said.tags
        nbytes = columns.stored_nbytes if planned is None else sum(c.values.nbytes for c in planned.columns)
        told = [named, groups, versions.tolist(), tagged, *(begin or ())]
        digest = await self._digest(planned or columns, told) if named else b""
        carried = self._carried(planned)
        if planned is not None and carried is not None:
            if self._appending > 1 and not named and not narrow:
                self._gathered.learn([(column.name, column.values) for column in planned.columns])
            asked = self._carrying(carried, _lengths(planned), said._replace(digest=digest, begin=begin), deadline)
            return await self._connection.exchange(asked)
        admit = m.Admit(
            self._connection.next_id(),
            self._token,
            rows,
            nbytes,
            int(versions.max()),
            named[0] if named else "",
            digest,
            deadline.remaining_s,
            self._own(columns) if planned is None else [],
        )
        if admit.handing:
            self._connection.handing.add(admit.id)
        self._connection.reserved(+1)  # signs of life, without which the admission is given up
        staged, ticket = "" if planned is None else f"{self._staging}-{next(self._appends)}", 0
        try:
            admitted = await self._connection.request(admit, m.Admitted, deadline.remaining_s)
            if not admitted.ticket:  # it was made before, by the very same call, whose answer was lost
                self._keep(admit)
                return named
            ticket = admitted.ticket
            if planned is None:
                ref, lengths = columns, await self._lengths_of(columns)
            else:
                ref = await self._writer.write(planned, staged, deadline.remaining_s)
                lengths = _lengths(planned)
            spares = await self._spares(ref, deadline)
            request = m.Append(
                self._connection.next_id(),
                self._token,
                ticket,
                staged,
                ref.encode(),
                named,
                digest,
                groups,
                versions.tobytes(),
                tagged,
                lengths,
                spares,
                admit.id if admit.handing else 0,
                deadline.remaining_s,
                begin,
            )
            reply = await self._connection.request(request, m.Appended, deadline.remaining_s)
            if self._connection.events is not None:
                self._connection.events.record(_APPEND, began, nbytes)
                flows.appended(self._connection, self._mark, reply, named, rows)
        except BaseException:
            self._unstage(staged, ticket)
            self._keep(admit)
            raise
        finally:
            self._connection.handing.discard(admit.id)
            self._connection.reserved(-1)
        return named or self._names(reply, rows)

    def appender(
        self,
        *,
        max_rows: int = 256,
        max_delay: float = 0.005,
        timeout: float | None = None,
        narrow: Narrow = False,
    ) -> AsyncAppender:
        """Gathers rows of this process into blocks of `max_rows` and appends each block at once. For many rows that are
        sent one by one; see `dataplane.client.appender`.

        max_delay: seconds that a row waits for others. timeout, narrow: as for `append`, for each block.
        """
        tasks: set[asyncio.Task[None]] = set()

        def begin(running: Coroutine[Any, Any, None]) -> None:
            task = asyncio.get_running_loop().create_task(running)
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        how: dict[str, Any] = {"max_rows": max_rows, "max_delay": max_delay, "timeout": timeout, "narrow": narrow}
        return self.gathering(begin, lambda work: work(), **how)

    def gathering(self, begin: Begin, soon: Callable[[Callable[[], object]], object], **how: Any) -> AsyncAppender:
        """An appender that runs by `begin` and `soon`."""
        return AsyncAppender(self, begin, soon, **how)

    def _carried(self, planned: Plan | None) -> m.Inline | None:
        """The columns as they travel in a message with their rows; None if they have to be put first."""
        return None if planned is None or self.settings.replicas > 1 else self._writer.inline(planned)

    def _own(self, ref: BatchRef) -> list[int]:
        """The shards of a reference that are on this plane's node."""
        own = [number for node, number in ref.shards() if node == self._connection.welcome.node]
        return own if len(own) <= _HANDED else []

    def _keep(self, admit: m.Admit) -> None:
        """The append failed: the shards remain the property of the caller, also if this process goes."""
        with suppress(DataplaneError):
            self._connection.check()
            if admit.handing:
                self._connection.tell(m.Cancel(admit.id))

    async def _spares(self, ref: BatchRef, deadline: Deadline) -> list[bytes]:
        """The other nodes that have copies of the columns."""
        if self.settings.replicas == 1:
            return []
        return await self._writer.replicate(ref, self.settings.replicas, deadline.remaining_s)

    async def _digest(self, columns: Plan | BatchRef, said: list[Any]) -> bytes:
        """A digest that only repetitions of this append share: xxh3-128 over its metadata and bytes."""
        state = xxhash.xxh3_128(msgspec.msgpack.encode(said))
        if isinstance(columns, BatchRef):
            state.update(columns.encode())
        else:
            await self._writer.in_thread(columns.nbytes, _digest_columns, state, columns, self._writer.each)
        return state.digest()

    def _unstage(self, staged: str, ticket: int = 0) -> None:
        """Free staged columns that were not appended. Does not wait; the end of the connection does the same."""
        with suppress(DataplaneError):
            self._connection.check()
            if ticket:
                self._connection.tell(m.GiveBack(self._token, ticket))
            if staged:
                self._connection.tell(m.Free(self._connection.next_id(), [], [], staged))

    async def _lengths_of(self, ref: BatchRef) -> dict[str, bytes]:
        measured = [name for name, field in ref.schema.items() if field.kind in MEASURED]
        if not measured:
            return {}
        batch = await self._getter.get(ref.select(*measured), TIMEOUT_S)
        return {name: np.asarray(batch[name].lengths()).tobytes() for name in measured}

    async def extend(
        self,
        rows: BatchRef | Sequence[str],
        columns: Any,
        *,
        replace: bool = False,
        timeout: float | None = None,
        narrow: Narrow = False,
        objects: Objects = "store",
    ) -> None:
        """Add columns to rows, in any order of rows and stages.

        rows: a reference of a delivery, any rows selected from it, or keys. columns, narrow, objects: as for `append`,
            with a row for each. An existing column is refused, unless `replace`, or unless an earlier holder of the row
            for the same task brought it and did not ack.

        Raises Misuse (a row does not exist or is named twice, or a column exists), LeaseExpired (the rows went to
        another consumer, are about to, or are done and gone), SchemaMismatch, Backpressure (no room in the node),
        OutcomeUnknown (no answer came: repeat it with `replace`).
        """
        if objects != "store" and refuses(objects):
            columns = await self._writer.without_objects(columns)
        if narrow:
            columns = await self._writer.narrowed(columns, narrow)
        await self.bring(rows, columns, replace, timeout)

    async def bring(
        self,
        rows: BatchRef | Sequence[str],
        columns: Any,
        replace: bool,
        timeout: float | None,
        piece: Callable[[bytes], Piece] | None = None,
    ) -> None:
        """Add columns to rows; or the next piece to a row in progress, which `piece` makes from a digest of the
        columns."""
        asked = self.extending(rows, columns, replace, timeout, piece)
        if asked is not None:
            await self._connection.exchange(asked)
            return
        deadline = Deadline.after(arguments.seconds(timeout, TIMEOUT_S))
        numbers, holds, keys = named = self._named(rows)
        staged, lengths = "", {}
        if isinstance(columns, BatchRef):
            ref, lengths = columns, await self._lengths_of(columns)
            made = None if piece is None else piece(await self._digest(columns, []))
        else:
            planned = await self._writer.plan(columns, ())
            made = None if piece is None else piece(await self._digest(planned, []))
            _check_rows(planned.rows, len(rows), planned.columns[0].name)
            if not planned.rows:
                return
            carried = self._carried(planned)
            if carried is not None:
                asked = self._bringing(carried, _lengths(planned), named, replace, deadline.remaining_s, made)
                await self._connection.exchange(asked)
                return
            staged = f"{self._staging}-{next(self._appends)}"
        try:
            if staged:
                ref = await self._writer.write(planned, staged, deadline.remaining_s)
                lengths = _lengths(planned)
            spares = await self._spares(ref, deadline)
            request = m.Extend(
                self._connection.next_id(),
                self._token,
                staged,
                ref.encode(),
                numbers,
                holds,
                keys,
                lengths,
                bool(replace),
                spares,
                made,
            )
            await self._connection.request(request, m.Done, 0.0)
        except BaseException:
            self._unstage(staged)
            raise

    def extending(
        self,
        rows: BatchRef | Sequence[str],
        columns: Any,
        replace: Any,
        timeout: Any,
        piece: Callable[[bytes], Piece] | None = None,
    ) -> Exchange[m.Done, None] | None:
        """The single request of a small, simple extend; None for any other. Raises as `extend`."""
        laid = None if self.settings.replicas > 1 else laid_out(columns, m.MAX_INLINE)
        if laid is None:
            return None
        _check_rows(laid.rows, len(rows), laid.columns[0][0])
        timeout_s = Deadline.after(arguments.seconds(timeout, TIMEOUT_S)).remaining_s
        carried = m.Inline(laid.payload, laid.layout, [nbytes for *_, nbytes in laid.columns])
        made = None if piece is None else piece(xxhash.xxh3_128_digest(bytes(laid.payload) + bytes(laid.layout)))
        return self._bringing(carried, laid.lengths, self._named(rows), replace, timeout_s, made)

    def _bringing(
        self,
        carried: m.Inline,
        lengths: dict[str, bytes],
        named: _Named,
        replace: Any,
        timeout_s: float,
        piece: Piece | None = None,
    ) -> Exchange[m.Done, None]:
        """An extend whose columns are in the message."""
        numbers, holds, keys = named
        request = m.ExtendInline(
            self._connection.next_id(),
            self._token,
            carried,
            numbers,
            holds,
            keys,
            lengths,
            bool(replace),
            timeout_s,
            piece,
        )
        return Exchange(self._connection, request, m.Done, timeout_s, lambda reply: None, admits=True)

    def _named(self, rows: BatchRef | Sequence[str]) -> _Named:
        """Rows by number with their delivery numbers, or by key."""
        if isinstance(rows, BatchRef):
            origins = rows.origins()
            if not origins and len(rows):
                raise Misuse("these rows were not delivered by a stream; pass a delivery's ref, or keys")
            if any(token != self._token for token, _, _ in origins):
                raise Misuse(f"these rows were delivered by another stream than {self.name!r}")
            numbers = np.empty(len(rows), np.int64)
            for _, at, of in origins:
                numbers[at] = of
            return numbers.tobytes(), rows.holds().tobytes(), []
        keys = arguments.listed("rows", rows)
        return b"", b"", arguments.keys_of(keys, len(keys))

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
        """Lease up to `rows` rows that have all of `columns`, as soon as `min_rows` are ready. The result is awaited,
        or entered as a context manager.

        sampler: chooses among the ready rows; None: the oldest first. Any object with `choose` (`dataplane.Sampler`);
            one that is not built in runs in this process.
        member, replica, replicas: ranks that must see the same rows name the same member, and each its replica, 0 to
            replicas - 1. Each gets each delivery once, in the same order. A restarted rank gets again what it had not
            acked.
        lease: seconds until the rows go to another consumer, unless they are acked or the lease is renewed.
        timeout: seconds to wait, 600 if None. After 10 s a log message says what is waited for.

        Raises NotReady at the deadline; Closed once the stream is closed and the task has no rows left, with the
        counts of `dead` letters and of rows that were dropped or `expired`; Misuse.
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
        deadline_s = arguments.seconds(timeout, CONSUME_TIMEOUT_S)
        sampler = Fifo() if sampler is None else sampler
        check_sampler(sampler)
        built_in = sampler if isinstance(sampler, _BUILT_IN) and type(sampler) in _BUILT_IN else None
        asked = r.Consume(
            task=arguments.text("a task", task),
            columns=tuple(arguments.names("columns", columns)),
            rows=arguments.whole("rows", rows),
            min_rows=arguments.whole("min_rows", min_rows),
            sampler=built_in,
            lease_s=arguments.seconds(lease, what="a lease"),
            member=arguments.text("a member", member) if member else "",
            replica=None if replica is None else arguments.whole("replica", replica),
            replicas=arguments.whole("replicas", replicas),
        )
        wait_log = _WaitLog(self, task, asked.columns) if deadline_s > LOG_WAIT_S else None
        try:
            if built_in is not None:
                given = await self.ask(asked, r.Delivered, deadline_s)
            else:
                began = time.monotonic_ns()
                given = await Sampling(self.ask, sampler, asked).run(deadline_s)
                if self._connection.events is not None:
                    self._connection.events.record(_CONSUME, began)
        except NotReady as error:
            raise await self.explained(error, task, asked.columns) from None
        finally:
            if wait_log is not None:
                wait_log.stop()
        balance = (sampler.column, sampler.shards) if isinstance(sampler, TokenBalanced) else None
        return Delivery(self._connection, self._getter, self._token, given, self._mark, balance)

    async def ask(self, asked: r.FromClient, kind: type[A], timeout_s: float = 0.0) -> A:
        """The answer of the partition of the stream. Raises what it refuses with."""
        request = m.AskStream(self._connection.next_id(), self._token, asked, timeout_s)
        return _result(await self._connection.request(request, m.StreamAnswer, timeout_s), kind)

    def tell(self, asked: r.FromClient) -> None:
        """As `ask`, without waiting for the answer."""
        with suppress(DataplaneError):
            self._connection.check()
            self._connection.tell(m.AskStream(self._connection.next_id(), self._token, asked))

    async def explained(self, error: NotReady, task: str, columns: Sequence[str]) -> NotReady:
        """The same error, with the reason why no rows are ready, if it is known."""
        why = await self.describe_wait(task, columns) if error.waited_s > 0 else ""
        fields = {"stream": error.stream, "task": error.task, "waited_s": error.waited_s}
        return NotReady(f"{error}: {why}", **fields) if why else error

    async def describe_wait(self, task: str, columns: Sequence[str]) -> str:
        """Why no rows with these columns are ready for a task; empty if the node does not answer."""
        try:
            async with asyncio.timeout(_WHY_S):
                figures = await self.stats()
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
        self, task: str, *, prefetch: int = 1, timeout: float | None = None, at_end: AtEnd = "warn", **how: Any
    ) -> AsyncIterator[Delivery]:
        """Iterates over deliveries until the stream is closed and the task has done all rows. Arguments as for
        `consume`.

        Each delivery is acked when the next is asked for. If the loop is left by `break` or an exception, it is given
        back unless it was acked.

        prefetch: how many further deliveries are leased, and fetched from other hosts, meanwhile.
        timeout: seconds to wait for each delivery, from when it is asked for.
        at_end: what happens at the end if rows of the task are dead letters, were dropped, or have expired: "warn"
            issues a `UserWarning`, "raise" raises Closed with the counts, "ignore" ends as if all were done.

        Raises as `consume`, and Closed if the stream is dropped.
        """
        check_at_end(at_end)
        wait_s = max(arguments.seconds(timeout, CONSUME_TIMEOUT_S), _ANSWER_S)
        ahead: list[asyncio.Task[Delivery]] = []
        context = recorder.context()

        async def one() -> Delivery:
            while True:
                with suppress(NotReady):  # perhaps nobody is waiting yet; who does keeps the time
                    delivery = await self.consume(task, timeout=CONSUME_TIMEOUT_S, **how)
                    self._getter.fetch_ahead(delivery.ref, TIMEOUT_S)
                    return delivery

        try:
            while True:
                while len(ahead) < 1 + max(0, prefetch):
                    ahead.append(asyncio.get_running_loop().create_task(one(), context=context))
                began = recorder.awaits()
                await asyncio.wait(ahead[:1], timeout=wait_s)
                recorder.awaited(context.run(recorder.place), began)
                if not ahead[0].done():
                    what = f"no rows of stream {self.name!r} became ready for task {task!r} in {wait_s:.1f} s"
                    error = NotReady(what, stream=self.name, task=task, waited_s=wait_s)
                    raise await self.explained(error, task, how.get("columns", ()))
                try:
                    delivery = ahead.pop(0).result()
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

    async def take(
        self,
        task: str,
        *,
        rows: int,
        shards: int,
        columns: Sequence[str],
        sampler: Sampler | None = None,
        min_rows: int | None = None,
        member: str | None = None,
        replica: int | None = None,
        replicas: int = 0,
        lease: float = 3600.0,
        timeout: float | None = None,
    ) -> Taken:
        """Lease the rows of one synchronous training step and split them over ranks, one reference for each. Reads no
        column.

        All of `rows` are leased, unless `min_rows` is less or whole groups do not fill them. With `TokenBalanced`
        the split balances tokens. The step is acked as a whole. Raises as `consume`.
        """
        if arguments.whole("shards", shards) < 1:
            raise Misuse(f"a step is split over one rank or more, not {shards}")
        delivery = await self.consume(
            task,
            rows=rows,
            columns=columns,
            min_rows=rows if min_rows is None else min_rows,
            sampler=sampler,
            member=member,
            replica=replica,
            replicas=replicas,
            lease=lease,
            timeout=timeout,
        )
        return Taken(delivery, delivery.split(shards))

    # the rest

    async def drop_rows(self, rows: BatchRef | Sequence[str] = (), *, groups: Sequence[str | int] = ()) -> None:
        """Drop rows, and all rows of these groups: no task is given them any more, and groups count as complete
        without them. Current holders may finish. Raises Misuse for a row or group that does not exist."""
        numbers, _, keys = self._named(rows)
        named = arguments.listed("groups", groups)
        named = arguments.plain("groups", named, len(named), (str, int))
        if numbers or keys or named:
            await self.ask(r.Drop(rows=np.frombuffer(numbers, np.int64), keys=keys, groups=named), r.Done)

    async def dead_letters(self, task: str, *, most: int = 1024) -> DeadLetters:
        """The first rows that this task gave back, or let the lease expire of, `max_deliveries` times. They stay
        until they are dropped."""
        asked = r.DeadLetters(task=arguments.text("a task", task), most=arguments.whole("most", most))
        return DeadLetters(self._token, await self.ask(asked, r.Letters))

    async def lost(self, task: str | None = None) -> LostRows:
        """Rows that were lost because a host with some of their columns died. Each is reported once, to whoever asks
        first, and can be appended again. Holders of such rows get `OwnerDied` when they read them. If all hosts died
        that kept the order of the rows, their keys are unknown: `unnamed` counts them by the node of their producers,
        as far as those live.

        task: leave out rows that this task had acked; they are reported to nobody. Raises Misuse for an unknown
        task.
        """
        had = 0 if task is None else 1 << self._task(task)
        reply = await self._connection.request(m.TakeLost(self._connection.next_id(), self._token), m.LostRows, 0.0)
        rows = [LostRow(key, group, version) for key, group, version, acked in reply.rows if not acked & had]
        return LostRows(rows, reply.unnamed)

    def _task(self, name: str) -> int:
        tasks = self.settings.tasks
        if name not in tasks:
            raise Misuse(f"stream {self.name!r} has no task {name!r}: it has {', '.join(tasks)}")
        return tasks.index(name)

    async def tend(self, key: str, what: str, token: int, lease_s: float) -> None:
        """Renew, release or give up a row in progress; see `wire.messages.TendRow`."""
        await self._connection.request(self._tending(key, what, token, lease_s), m.Done, 0.0)

    async def take_up(self, key: str, token: int, lease_s: float) -> list[Listed]:
        """Take over a row in progress or, without a key, the first free one; empty if none is free."""
        asked = self._tending(key, "take", token, lease_s)
        return _result(await self._connection.request(asked, m.StreamAnswer, 0.0), r.UnfinishedRows).rows

    def _tending(self, key: str, what: str, token: int, lease_s: float) -> m.TendRow:
        return m.TendRow(self._connection.next_id(), self._token, key, what, token, lease_s)

    async def list_unfinished(self, most: int) -> list[Listed]:
        """The rows in progress, as messages have them."""
        return (await self.ask(r.ListUnfinished(most=most), r.UnfinishedRows)).rows

    async def read(self, ref: BatchRef, timeout: float) -> Batch:
        """As `plane.get`."""
        return await self._getter.get(ref, timeout)

    async def begin(
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
    ) -> AsyncRow:
        """Begin a row that grows piece by piece; see `client.unfinished.begin`."""
        said: dict[str, Any] = {"group": group, "version": version, "tags": tags, "columns": columns}
        return await unfinished.begin(self, key, **said, tokens=tokens, lease=lease, timeout=timeout)

    async def unfinished(self) -> list[Unfinished]:
        """The rows in progress; see `client.unfinished.Unfinished`."""
        return await unfinished.listed(self)

    async def resume(self, key: str | None = None, *, lease: float = LEASE_S) -> AsyncRow | None:
        """Take over a row in progress that has no producer; see `client.unfinished.resume`."""
        return await unfinished.resume(self, key, lease)

    async def stats(self) -> Mapping[str, Any]:
        """Statistics of the stream: see `docs/operations.md`."""
        return (await self.ask(r.Measure(), r.Figures)).values

    async def checkpoint(self, path: str | os.PathLike[str], *, timeout: float = TIMEOUT_S) -> None:
        """Write the stream to a file for `plane.restore`: its rows, their columns, and the progress of each task.

        The stream goes on meanwhile; later changes are not in the file. Leased rows will be ready again. An existing
        file is replaced only once the new one is completely on disk. timeout: seconds to wait for memory to read each
        part of spilled columns.

        Raises Misuse (no file can be written there), LimitExceeded (the disk is full), Backpressure, Lost.
        """
        from dataplane.client import checkpoint  # seldom needed, and the import of all would be longer

        to = checkpoint.Writing.to(path, self._getter, self._writer, self._connection.welcome.capacity, timeout)
        await checkpoint.write(self, to)

    async def record(
        self, directory: str | os.PathLike[str], columns: Sequence[str] | None = None, **how: Any
    ) -> Recording:
        """Begin to record rows as they are done, each once, to a directory of Parquet files: see `docs/recording.md`.

        columns: what is recorded; a row is done when it has all of them. None: those that rows have once each other
            task has done one.
        task: the recorder's, one of the stream's ("record"). rows: at most, at a time (256). max_file_bytes: of a file,
            before compression ("256MiB"). media: columns that are stored once by content, beside those that are found.
        compression: "zstd", "snappy", "lz4" or "none". on_full: "skip" passes rows over while the disk is full, and
            tells; "wait" leaves them in the stream.

        Raises Misuse. What goes wrong later is raised by the recording's `wait` and `close`.
        """
        from dataplane.client import recorder  # as above

        return await asyncio.to_thread(recorder.record, self, directory, columns, **how)

    async def close(self) -> None:
        """Close the stream: nothing can be appended any more; consumers go on until all is done. Idempotent."""
        await self.ask(r.Close(), r.Done)

    async def drop(self) -> None:
        """Free the stream with all rows, delivered or not. Waiting calls raise `Closed`."""
        await self._connection.request(m.DropStream(self._connection.next_id(), self._token), m.Done, 0.0)


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


def _result(answer: m.StreamAnswer, kind: type[A]) -> A:
    """The result of an answer. Raises ProtocolMismatch if it is of another type."""
    if not isinstance(answer.result, kind):
        raise ProtocolMismatch(f"a stream answered {type(answer.result).__name__} where {kind.__name__} was due")
    return answer.result


def _check_rows(found: int, rows: int, column: str) -> None:
    """Raises SchemaMismatch if the columns of an extend do not have a row for each."""
    if found != rows:
        raise SchemaMismatch(
            f"{found} rows of new columns for {rows} rows",
            column=column,
            expected=f"{rows} rows",
            found=f"{found} rows",
        )


def _lengths(planned: Plan) -> dict[str, bytes]:
    return {c.name: c.lengths.tobytes() for c in planned.columns if c.lengths is not None}


def _digest_columns(state: Any, planned: Plan, each: Each) -> None:
    for column in planned.columns:
        state.update(msgspec.msgpack.encode((column.name, column.field)))
        for digest in digests(column.values, each):
            state.update(digest)
