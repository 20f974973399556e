"""A client's interface to a stream: append, extend, consume and acknowledge rows."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, get_args

import numpy as np

from dataplane.background_tasks import BackgroundTasks
from dataplane.batch.put_options import Narrow, Objects
from dataplane.batch.put_plan import PutPlan, columns_of
from dataplane.batch.ref import BatchRef
from dataplane.client import arguments, consuming
from dataplane.client.appender import TIMEOUT_S, AsyncAppender
from dataplane.client.connection import Connection, Exchange
from dataplane.client.consuming import (
    CONSUME_LEASE_S,
    CONSUME_TIMEOUT_S,
    LOG_WAIT_S,
    AtEnd,
    Consuming,
    Sampling,
    WaitLog,
    check_sampler,
)
from dataplane.client.delivery import DeadLetters, Delivery, LostRow, LostRows, Taken
from dataplane.client.reader import Getter
from dataplane.client.stream_writes import StreamWrites
from dataplane.client.unfinished import LEASE_S, AsyncRow, RowToken, row_lease, row_token, unfinished_rows
from dataplane.client.writer import ShardWriter
from dataplane.errors import DataplaneError, Misuse, NotReady, OutcomeUnknown, ProtocolMismatch
from dataplane.observe.ring import CODE
from dataplane.stream import requests as r
from dataplane.stream.pieces import SPANS, Listed
from dataplane.stream.sampler import BuiltIn, Fifo, Sampler, TokenBalanced
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm

if TYPE_CHECKING:
    from dataplane.client.histories import HistoryFollower
    from dataplane.client.recorder import Recording
    from dataplane.client.replay import Replay

_CONSUME = CODE["consume"]
_BUILT_IN = get_args(BuiltIn)

A = TypeVar("A", bound=r.StreamResult)


class AsyncStream:
    """A stream of the node of this plane. Created by `plane.stream`; any number of processes may use it at once."""

    traced: ClassVar[bool] = False
    """See `AsyncPlane.traced`."""
    follower: HistoryFollower | None = None
    """The recorder of the stream's rows in a history, if `plane.stream` was given one."""
    replay: Replay | None = None
    """The replay that fills the stream from a recording, if `plane.replay` made it."""

    def __init__(
        self, connection: Connection, writer: ShardWriter, getter: Getter, name: str, opened: rm.Opened
    ) -> None:
        self.name = name
        self._connection = connection
        self._writer = writer
        self._getter = getter
        self._token = opened.stream
        self._mark = opened.mark
        self.settings = opened.settings
        """The tasks and limits of the stream. The value 0 means no limit; for `max_lag`, -1 does."""
        self.writes = StreamWrites(self)
        """Writes rows and columns."""
        self.logged_waits: set[str] = set()
        """The tasks for which this object has logged a wait."""
        self._unsure: dict[str, int] = {}  # by key, the tokens of rows whose `begin` had no answer
        self._appending = 0  # appends in progress outside `_gathered`
        self._gathered = self.appender(max_rows=rm.MAX_ROWS, max_delay=0)

    def __repr__(self) -> str:
        return f"<stream {self.name!r} with the tasks {', '.join(self.settings.tasks)}>"

    def _expect(self, columns: Any) -> None:
        """If several calls append now, prepare to merge further appends of columns with this schema."""
        if self._appending > 1:
            planned = isinstance(columns, PutPlan)
            self._gathered.learn(
                [(c.name, c.values) for c in columns.columns] if planned else list(columns_of(columns))
            )

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

        columns: as for `plane.put`, or a reference to rows that were put. The stream then owns the referenced rows,
            even if they are freed elsewhere. It frees them once no task needs them.
        keys: for each row, a text that does not begin with "~". Without `keys`, they are generated.
        group: a text or integer for each row, or one for all. Rows of one prompt share a group, of at most `group_size`
            rows. A row with None is in a separate group.
        version: the policy version that made the rows, an integer for each row or one for all.
        tags: by name, a text, number or flag for each row, or one for all. Samplers read tags.
        timeout: seconds to wait for room in the stream and the node; 60 if None.
        narrow: as for `plane.put`. The dtype is the narrowest for the integers of this append.
        objects: as for `plane.put`.

        Repeating an append with the same keys and content while its rows are in the stream changes nothing. Concurrent
        small appends without keys are merged (`client.appender`). A cancelled append may still take effect, unless it
        was waiting for room.

        Raises Backpressure (the stream is full; the error names the task that is behind), LimitExceeded (the rows can
        never fit), Closed, SchemaMismatch, KeyExists (a key is in the stream, with other content), Misuse (a group
        would exceed `group_size`), Freed (the reference is to freed rows), OutcomeUnknown (no answer came: the rows may
        be appended now or later).
        """
        columns = await self._writer.optioned(columns, False, objects)
        # A call with a shorter timeout must not wait for others.
        if self._appending and keys is None and timeout is None and not narrow:
            sent = self._gathered.offer_small(columns, group, version, tags)
            if sent is not None:
                try:
                    return await sent
                except asyncio.CancelledError:
                    sent.withdraw()
                    raise
        self._appending += 1
        try:
            asked = None if narrow else self.writes.appending(columns, keys, group, version, tags, timeout)
            if asked is not None:
                return await self._connection.exchange(asked)
            how: dict[str, Any] = {"keys": keys, "group": group, "version": version, "tags": tags}
            return await self.writes.append_block(columns, **how, timeout=timeout, narrow=narrow)
        finally:
            self._appending -= 1

    def _exchange_append(
        self, columns: Any, *, narrow: Any, objects: Any, **how: Any
    ) -> Exchange[Any, list[str]] | None:
        """The request of a small, simple append; None for any other append. Raises as `append`."""
        return None if narrow or objects != "store" else self.writes.appending(columns, **how)

    def appender(
        self, *, max_rows: int = 256, max_delay: float = 0.005, timeout: float | None = None, narrow: Narrow = False
    ) -> AsyncAppender:
        """Return an appender, which gathers rows that are sent one by one into blocks and appends each block at once.
        See `dataplane.client.appender`.

        max_rows: the number of rows at which a block is full. max_delay: seconds that a block waits for further rows.
        timeout, narrow: as for `append`, for each block.
        """
        how: dict[str, Any] = {"max_rows": max_rows, "max_delay": max_delay, "timeout": timeout, "narrow": narrow}
        return AsyncAppender(self, BackgroundTasks().spawn, lambda work: work(), **how)

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
        """Add columns to rows. Rows and columns may be added in any order.

        rows: the reference of a delivery, rows selected from it, or keys.
        columns, narrow, objects: as for `append`, with one row for each of `rows`.
        replace: whether to replace columns that a row has. If false, an existing column is refused, unless `rows` is of
            a delivery, and the column was added under an earlier, unacked delivery of these rows to the same task.
        timeout: seconds to wait for room in the node; 60 if None.

        Raises Misuse (a row does not exist or is named twice, or a column exists), LeaseExpired (the lease of the rows
        has ended, or they were done and freed), SchemaMismatch, Backpressure (no room in the node), LimitExceeded,
        Freed, OutcomeUnknown (no answer came: repeat the call with `replace`).
        """
        columns = await self._writer.optioned(columns, narrow, objects)
        await self.writes.extend(rows, columns, replace, timeout)

    def _exchange_extend(
        self, rows: Any, columns: Any, *, narrow: Any, objects: Any, **how: Any
    ) -> Exchange[Any, None] | None:
        """The request of a small, simple extend; None for any other extend. Raises as `extend`."""
        return None if narrow or objects != "store" else self.writes.extending(rows, columns, **how)

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
        lease: float = CONSUME_LEASE_S,
        timeout: float | None = None,
    ) -> Consuming:
        """Lease up to `rows` rows that have all of `columns`, as soon as `min_rows` are ready. Returns the delivery. As
        a context manager, it is acked at the end of the block.

        sampler: the choice among ready rows; None: the oldest first. An object with `choose` (`dataplane.Sampler`). A
            sampler that is not built in runs in this process.
        member, replica, replicas: ranks that must see the same rows give the same `member` and `replicas`, and each
            another `replica`, 0 to replicas - 1. Each rank gets each delivery once, in the same order. A restarted
            rank receives again the deliveries that it has not acked.
        lease: seconds after which rows without an ack are delivered again, unless the lease is renewed.
        timeout: seconds to wait; 600 if None. After 10 s, the log has the reason of the wait.

        Raises NotReady at the deadline; Closed once the stream is closed and the task has no rows left (`dead`: its
        dead letters, `expired`: rows that expired or were dropped); Misuse; LimitExceeded for more than 65,536 rows.
        """
        chooses = Fifo() if sampler is None else sampler
        check_sampler(chooses)
        asked = r.Consume(
            task=arguments.text("a task", task),
            columns=tuple(arguments.names("columns", columns)),
            rows=arguments.whole("rows", rows),
            min_rows=arguments.whole("min_rows", min_rows),
            sampler=chooses if isinstance(chooses, _BUILT_IN) and type(chooses) in _BUILT_IN else None,
            lease_s=arguments.seconds(lease, what="a lease"),
            member=arguments.text("a member", member) if member else "",
            replica=None if replica is None else arguments.whole("replica", replica),
            replicas=arguments.whole("replicas", replicas),
        )
        deadline_s = arguments.seconds(timeout, CONSUME_TIMEOUT_S)
        return Consuming(lambda asked: self._consume(asked, chooses, deadline_s), asked)

    async def _consume(self, asked: r.Consume, sampler: Sampler, deadline_s: float) -> Delivery:
        """Send the request of a consume; run a sampler that is not built in here. Returns the delivery."""
        wait_log = WaitLog(self, asked.task, asked.columns) if deadline_s > LOG_WAIT_S else None
        try:
            if asked.sampler is not None:
                given = await self.ask(asked, r.Delivered, deadline_s)
            else:
                began = time.monotonic_ns()
                given = await Sampling(self, sampler, asked).run(deadline_s)
                if self._connection.events is not None:
                    self._connection.events.record(_CONSUME, began)
        except NotReady as error:
            how = {"columns": asked.columns, "min_rows": asked.min_rows, "sampler": sampler}
            raise await consuming.explained(self, error, asked.task, how) from None
        finally:
            if wait_log is not None:
                wait_log.stop()
        balance = (sampler.column, sampler.shards) if isinstance(sampler, TokenBalanced) else None
        return Delivery(self, given, balance)

    async def ask(self, asked: r.FromClient, kind: type[A], timeout_s: float = 0.0) -> A:
        """Send a request to the stream's partition. Returns the answer. Raises the partition's error, and
        ProtocolMismatch if the answer's type is not `kind`."""
        request = rm.AskStream(self._connection.next_id(), self._token, asked, timeout_s)
        answer = await self._connection.request(request, rm.StreamAnswer, timeout_s)
        if not isinstance(answer.result, kind):
            raise ProtocolMismatch(f"a stream answered {type(answer.result).__name__} where {kind.__name__} was due")
        return answer.result

    def tell(self, asked: r.FromClient) -> None:
        """Send a request to the stream's partition, without waiting for the answer. Raises no DataplaneError."""
        with suppress(DataplaneError):
            self._connection.check()
            self._connection.tell(rm.AskStream(self._connection.next_id(), self._token, asked))

    def deliveries(
        self, task: str, *, prefetch: int = 1, timeout: float | None = None, at_end: AtEnd = "warn", **how: Any
    ) -> AsyncIterator[Delivery]:
        """Iterate over deliveries until the stream is closed and the task has no rows left. Each delivery is acked when
        the next is requested. If the loop is left by `break` or an exception, the last delivery without an ack is given
        back.

        how: the other arguments of `consume`. When the loop's body gets a delivery, at least nine tenths of its `lease`
            are left.
        prefetch: the number of further deliveries that are leased, and fetched from other hosts, during the loop's
            body.
        timeout: seconds to wait for each delivery, from its request; 600 if None.
        at_end: the action at the end if rows of the task are dead letters, were dropped, or have expired: "warn" issues
            a `UserWarning`, "raise" raises Closed with the counts, "ignore" does nothing.

        Raises as `consume`; Closed if the stream is dropped; OutcomeUnknown if an ack was not answered. A new iteration
        then gets the rows again, unless the ack was done.
        """
        return consuming.deliveries(self, task, prefetch, timeout, at_end, how)

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
        """Lease the rows of one synchronous training step, and split them over ranks. Returns one reference for each
        rank, to be acked together. Reads no column.

        rows: the number of rows; fewer if `min_rows` is less or whole groups do not fill it. shards: the number of
        ranks. With `TokenBalanced`, ranks get about equally many tokens. Other arguments and errors: as for `consume`.
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
        """Drop these rows, and all rows of these groups. Dropped rows are not delivered again, and groups are complete
        without them. Current holders may finish. Raises Misuse for a row or group that does not exist."""
        numbers, _, keys = self.writes.named(rows)
        named = arguments.listed("groups", groups)
        named = arguments.plain("groups", named, len(named), (str, int))
        if numbers or keys or named:
            await self.ask(r.Drop(rows=np.frombuffer(numbers, np.int64), keys=keys, groups=named), r.Succeeded)

    async def dead_letters(self, task: str, *, most: int = 1024) -> DeadLetters:
        """The first `most` rows that were delivered to this task `max_deliveries` times without an ack. They stay in
        the stream until they are dropped, or done after a `retry`. Raises Misuse for an unknown task."""
        asked = r.ListDeadLetters(task=arguments.text("a task", task), most=arguments.whole("most", most))
        return DeadLetters(self._token, await self.ask(asked, r.Letters))

    async def retry(self, task: str, keys: Sequence[str] | None = None) -> int:
        """Make dead letters of this task pending again, with no deliveries counted. Returns the number of retried rows.

        keys: keys from `dead_letters`; None: all dead letters of the task, at most 65,536 in one call. Other rows are
            left as they are. If the stream has a `group_size`, or the task has taken whole groups, the other dead
            letters of the same groups are retried too.

        Raises Misuse for a task or row that does not exist.
        """
        self.settings.task(arguments.text("a task", task))
        named = [] if keys is None else arguments.listed("keys", keys)
        asked = r.Retry(task=task, keys=arguments.keys_of(named, len(named)))
        return 0 if keys is not None and not named else (await self.ask(asked, r.RetryResult)).rows

    async def lost(self, task: str | None = None) -> LostRows:
        """Return the rows that were lost because a host with some of their columns died. Each is reported once, to the
        first caller, and can be appended again. A consumer that reads a lost row gets `OwnerDied`. If all hosts with
        the metadata of the rows died, their keys are unknown. `unnamed` then has their number, by the live node whose
        clients appended them.

        task: leave out rows that this task had acked. They are not reported later either. Raises Misuse for an unknown
        task.
        """
        had = 0 if task is None else 1 << self.settings.task(task)
        reply = await self._connection.request(
            rm.TakeLostRows(self._connection.next_id(), self._token), rm.LostRowsTaken, 0.0
        )
        told = [reply, *(earlier for earlier in self._connection.lost_rows if earlier.stream == self._token)]
        self._connection.lost_rows[:] = [other for other in self._connection.lost_rows if other not in told]
        unnamed: Counter[str] = Counter()
        for each in told:
            unnamed.update(each.unnamed)
        rows = [
            LostRow(key, group, version) for each in told for key, group, version, acked in each.rows if not acked & had
        ]
        return LostRows(rows, unnamed)

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
        """Begin a row that is appended piece by piece, and return it. The row counts for the stream and its group at
        once. It is delivered once it is finished. As a context manager it is finished at the end of the block, and
        released if an exception leaves the block.

        key, group, version, tags, timeout: as for `append`, for one row.
        columns: a mapping of the first columns, such as the prompt, each of one row.
        tokens: the ragged column of tokens, which `version_spans` counts.
        lease: seconds without a piece or a renewal after which another process may resume the row. Once the holder's
            process has ended, another may resume it at once.

        Raises as `append`.
        """
        if columns is not None and (not hasattr(columns, "keys") or {SPANS, tokens} & {**columns}.keys()):
            what = f"a mapping of names to columns, without {SPANS!r} and {tokens!r}, which its pieces bring"
            raise Misuse(f"a row begins with {what}; not {columns!r:.100}")
        token, lease_s = self._unsure.get(key or "") or row_token(), row_lease(lease)
        first = {**(columns or {}), SPANS: [np.zeros((0, 3), np.int64)]}
        how: dict[str, Any] = {"keys": None if key is None else [key], "group": group, "version": version, "tags": tags}
        said = token, lease_s, arguments.text("a column", tokens)
        try:
            (named,) = await self.writes.append_block(first, **how, timeout=timeout, begin=said)
        except (OutcomeUnknown, asyncio.CancelledError):  # the same call again has the same token, and is done once
            if key is not None:
                self._unsure[key] = token
            raise
        self._unsure.pop(named, None)
        begun = Listed(0, named, group, version, dict(tags or {}), tokens, 0, [], 0.0, False)
        return AsyncRow(self, begun, token, lease_s)

    async def unfinished(self) -> list[RowToken]:
        """The unfinished rows, the oldest first; at most 4,096."""
        return list(map(RowToken.of, await unfinished_rows(self)))

    async def resume(self, key: str | None = None, *, lease: float = LEASE_S) -> AsyncRow | None:
        """Take over an unfinished row, to continue after its last piece. Returns the row. Without a key, it is the
        oldest row without a holder, or None if there is none. Only one of several callers gets a row. Raises
        LeaseExpired if another process holds the row with this key, or it is not unfinished."""
        token, lease_s = row_token(), row_lease(lease)
        named = "" if key is None else arguments.text("a key", key)
        try:
            reply = await self.ask(r.ResumeRow(key=named, token=token, lease_s=lease_s), r.UnfinishedRows)
        except (OutcomeUnknown, asyncio.CancelledError):
            self.tell(r.RenewRow(token=token, free=True))
            raise
        return AsyncRow(self, reply.rows[0], token, lease_s) if reply.rows else None

    async def stats(self) -> Mapping[str, Any]:
        """Statistics of the stream: see `docs/operations.md`."""
        return (await self.ask(r.Measure(), r.PartitionFigures)).values

    async def checkpoint(self, path: str | os.PathLike[str], *, timeout: float = TIMEOUT_S) -> None:
        """Write the rows, their columns, and the progress of each task to a file for `plane.restore`.

        The stream can be used meanwhile; later changes are not in the file. In the restored stream, leased rows are
        ready. An existing file is replaced once the new file is completely on disk. timeout: seconds to wait for memory
        to read each part of spilled columns.

        Raises Misuse (no file can be written there), LimitExceeded (the disk is full), Backpressure, Lost, LeaseExpired
        (the leader changed meanwhile), Closed (the stream was dropped).
        """
        from dataplane.client import checkpoint  # seldom needed, and the import of all would be longer

        await checkpoint.write(self, path, timeout)

    async def record(
        self, directory: str | os.PathLike[str], columns: Sequence[str] | None = None, **how: Any
    ) -> Recording:
        """Begin to record each row once it is done, to a directory of Parquet files. Returns the recording, whose
        `wait` and `close` raise later errors. Raises Misuse. See `docs/recording.md`.

        columns: the columns to record. A row is recorded when it has all of them. None: the columns of the stream once
            every other task has acked a row.
        task: the recorder's task of the stream ("record"). rows: the most rows of one delivery (256).
        max_file_bytes: the most bytes of one file, before compression ("256MiB"). media: columns whose equal values are
            stored once, in addition to those found automatically.
        compression: "zstd", "snappy", "lz4" or "none". on_full: while the disk is full, "skip" skips and counts rows,
            and logs a warning; "wait" leaves them in the stream.
        """
        from dataplane.client import recorder  # imported late, as in `checkpoint`

        return await asyncio.to_thread(recorder.record, self, directory, columns, **how)

    async def close(self) -> None:
        """Refuse further appends. Consumers still get the remaining rows. Idempotent."""
        await self.ask(r.Close(), r.Succeeded)

    async def drop(self) -> None:
        """Remove the stream and free all of its rows, also leased ones. Waiting calls raise `Closed`."""
        await self._connection.request(rm.DropStream(self._connection.next_id(), self._token), m.Done, 0.0)
