"""The plane: this process's handle to the system, for asyncio. `client.sync` wraps it for blocking callers.

Invariants: a put that fails or is cancelled leaves nothing stored. A get that fails or is cancelled leaves nothing
pinned. Views stay valid after the plane is closed.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from dataplane.batch.batch import Batch
from dataplane.batch.field import is_text
from dataplane.batch.put_options import Narrow, Objects
from dataplane.batch.ref import BatchRef
from dataplane.client import arguments, background, device_get, embedded, histories, ownership, weights
from dataplane.client.connection import Connection, Exchange
from dataplane.client.draft import Draft, Spec
from dataplane.client.kept_columns import KeptColumns
from dataplane.client.reader import Getter
from dataplane.client.streams import AsyncStream
from dataplane.client.tables import AsyncTable
from dataplane.client.warn import warn
from dataplane.client.writer import ShardWriter
from dataplane.clock import Deadline
from dataplane.closing import close_each
from dataplane.config import format_size
from dataplane.device import ordering
from dataplane.device.memory import device_of
from dataplane.diagnosis.causes import Diagnosis
from dataplane.errors import DataplaneError, Misuse
from dataplane.observe.stats import Stats
from dataplane.threads import Pool
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm
from dataplane.wire import shard_messages as sm

TIMEOUT_S = 60.0
"""The default timeout of a put, get or draft, in seconds."""

GPU_BUDGET = 1 << 30  # bytes that a plane keeps on devices by default


class AsyncPlane:
    """A connection to this host's node. Made by `connect`.

    It must be used from the event loop in which it was connected. After a fork, the child must connect by itself.
    """

    traced: ClassVar[bool] = False
    """Whether each call is recorded as a span (`client.traced`). A blocking call must then run the coroutine."""

    def __init__(
        self, connection: Connection, node: embedded.EmbeddedNode | None = None, gpu_budget: int = GPU_BUDGET
    ) -> None:
        self.connection = connection
        """The connection to the node. `connection`, `writer` and `pool` are for this package only."""
        self._node = node
        self.pool = Pool(1 + min(4, os.cpu_count() or 1), "dataplane-copy")
        self.writer = ShardWriter(connection, self.pool)
        self._kept_columns = KeptColumns(connection, self.writer, gpu_budget)
        self._getter = Getter(connection)
        self._closed = False
        if connection.welcome.prewarm:
            self.pool.submit(connection.prewarm)

    @property
    def address(self) -> str:
        """The address for other processes of this host."""
        return self.connection.address

    def check(self) -> None:
        """Raise Closed, Forked or PeerUnavailable if this plane cannot be used any more."""
        self.connection.check()

    def busy(self) -> bool:
        """Whether the event loop must run between calls: to send heartbeats of open reservations, to release the grant
        of a cancelled call when its answer comes, or to serve columns that this process keeps on a device."""
        return self.connection.heartbeat.beats or self.connection.owed or self._kept_columns.live

    # Putting

    async def put(
        self,
        columns: Any,
        *,
        scope: str | None = None,
        dedupe: Collection[str] = (),
        replicas: int = 1,
        timeout: float = TIMEOUT_S,
        device: str | None = None,
        narrow: Narrow = False,
        objects: Objects = "store",
    ) -> BatchRef:
        """Store columns with equal row counts, and return a reference to them.

        columns: a mapping of names to values, a TensorDict, an Arrow table or record batch, or a Batch.
            `docs/concepts.md` has the kind of column for each kind of value.
        narrow: True, or the names of columns whose integers are stored in the narrowest dtype that holds them. Reads
            return the original dtype; `Column.narrow` gives the stored one.
        objects: "refuse" raises SchemaMismatch, with the row, if a column would be stored as objects.
        scope: a name for all puts that are to be freed together by `free(scope=...)`.
        dedupe: names of columns whose equal rows are stored once.
        replicas: the number of hosts that store the columns. With 2, the columns survive the loss of one host.
        timeout: seconds to wait for room.
        device: "keep" leaves tensors on their device, where other processes of this host can map them. Beyond the
            `gpu_budget` of `connect` the oldest are copied to the node's memory. Closing the plane copies all of them.
            If this process dies, they are lost (OwnerDied). Misuse if combined with `replicas`.

        Raises SchemaMismatch (the values cannot be columns), Backpressure (no room in time; the error names the
        holders of the memory), LimitExceeded (more than the memory budget, or replicas without a cluster),
        PeerUnavailable (also if the cluster has fewer hosts than replicas). A cancelled put leaves nothing stored.
        """
        self.check()
        columns = await self.writer.optioned(columns, narrow, objects)
        how: dict[str, Any] = {"scope": scope, "dedupe": dedupe, "replicas": replicas, "timeout": timeout}
        asked = self._exchange_put(columns, **how, device=device, narrow=False, objects="store")
        if asked is not None:
            return await self.connection.exchange(asked)
        self.check()
        scope, deadline = _scope(scope), Deadline.after(arguments.seconds(timeout))
        copies = arguments.replicas(replicas)
        if device not in (None, "keep"):
            raise Misuse(f'device is "keep", which leaves tensors on their devices, or None; not {device!r}')
        if device and copies > 1:
            raise Misuse(f'device="keep" stores the rows on one host: leave out replicas={copies}')
        planned = await self.writer.plan(columns, dedupe)
        kept = await self._kept_columns.keep(columns, planned, scope, deadline.remaining_s) if device else []
        ref = await self.writer.write(planned, scope, deadline.remaining_s, kept)
        if copies > 1 and len(ref):
            try:
                await self.writer.replicate(ref, copies, deadline.remaining_s)
            except BaseException:
                with suppress(DataplaneError):
                    shards = [number for _, number in ref.shards()]
                    self.connection.tell(sm.Free(self.connection.next_id(), shards))
                raise
        return ref

    def _exchange_put(
        self,
        columns: Any,
        *,
        scope: Any,
        dedupe: Any,
        replicas: Any,
        timeout: Any,
        device: Any,
        narrow: Any,
        objects: Any,
    ) -> Exchange[Any, BatchRef] | None:
        """The request of a put of small, simple columns; None for other columns. Raises as `put`."""
        self.check()
        if dedupe or replicas != 1 or device is not None or narrow or objects != "store":
            return None
        return self.writer.put_exchange(columns, _scope(scope), arguments.seconds(timeout))

    async def draft(
        self, columns: Mapping[str, Spec], *, scope: str | None = None, timeout: float = TIMEOUT_S
    ) -> Draft:
        """Reserve shared memory for columns that the caller writes in place. Returns the draft, to be sealed.

        columns: the specification of each column, from `dataplane.dense` or `dataplane.ragged`. scope, timeout: as for
        `put`. Raises as `put`, and SchemaMismatch if the row counts differ or the draft would be empty.
        """
        self.check()
        return await Draft.open(self.connection, columns, _scope(scope), arguments.seconds(timeout))

    # Getting

    async def get(
        self,
        ref: BatchRef,
        *,
        timeout: float = TIMEOUT_S,
        device: Any = None,
        out: Mapping[str, Any] | None = None,
        group: Any = None,
    ) -> Batch:
        """Read the rows and columns of a reference. Returns a batch, without a copy of columns that are contiguous.

        timeout: seconds to wait for memory into which spilled shards are read back.
        device: the device of the batch's tensors, such as "cuda"; see `Batch.to`.
        out: arrays or tensors to fill, by column name: [rows, *shape] for a dense column, all items concatenated for a
            ragged one. Another dtype or shape raises SchemaMismatch.
        group: a group of `torch.distributed`. All of its ranks must call `get` now, each for its own rows; see
            `dataplane.collective.get`.

        Raises Freed, OwnerDied, Corrupt, Backpressure, LimitExceeded (more at once than the memory budget),
        PeerUnavailable; Misuse if there is no such device.
        """
        self.check()
        device = None if device is None else device_of(device)
        if group is None:
            batch = await self.read(ref, timeout)
        else:
            batch = await device_get.together(self, _reference(ref), group, arguments.seconds(timeout))
        if device is None and out is None:
            return batch
        nbytes = device_get.nbytes(batch, device, out)
        return await self.writer.in_thread(nbytes, device_get.placed, batch, device, out, self.pool, ordering.noted())

    def getting(self, ref: BatchRef, timeout: float) -> Exchange[Any, Batch] | None:
        """The first request of a `get` without a group; None if the reference needs none. Raises as `get`."""
        self.check()
        return self._getter.getting(_reference(ref), arguments.seconds(timeout))

    async def read(self, ref: BatchRef, timeout: float) -> Batch:
        """Read a reference as `get` does without a group, device and `out`: the batch is in host memory.
        `device_get.placed` copies it to a device."""
        self.check()
        return await self._getter.get(_reference(ref), arguments.seconds(timeout))

    async def prefetch(self, ref: BatchRef, *, timeout: float = TIMEOUT_S) -> None:
        """Begin to read a reference from disk or other hosts, so that a later `get` finds the rows in memory.
        Returns at once; the later `get` raises an error. timeout: seconds after which the prefetch is given up."""
        self.check()
        self._getter.prefetch(_reference(ref), arguments.seconds(timeout))

    # Freeing

    async def free(self, ref: BatchRef | None = None, *, scope: str | None = None) -> None:
        """Free the rows and columns of a reference, or everything put under a scope. Freeing freed rows does nothing.

        Existing views stay valid. Once the last view of a shard is dropped, the whole pages of its freed rows are
        released. The rest of the shard is released when all of its rows and columns are freed.

        Raises OwnerDied if the rows are on another node and this node is in no cluster, Misuse, PeerUnavailable;
        OutcomeUnknown if a node of the rows does not answer, or is away and may come back: free the reference again.
        """
        self.check()
        if (ref is None) == (scope is None):
            raise Misuse("free takes a reference or a scope, and one of them")
        await ownership.free(self.connection, None if ref is None else _reference(ref), _scope(scope))

    async def retain(self, ref: BatchRef) -> BatchRef:
        """Return a further reference to the same stored rows and columns, as a separate owner. Copies nothing.

        The rows stay until every owner has freed its reference, in any order. Until then, any reference reads them.
        Freeing a reference, even repeatedly, ends only its own ownership. Freeing a scope ends only the ownership of
        the references that `put` returned.

        Raises Freed (a row was freed), OwnerDied (the row's node died), LimitExceeded (more rows than a message can
        name, or too many owners for the node to track), PeerUnavailable. A cancelled retain has retained nothing.
        """
        (retained,) = await self.retain_each([ref])
        return retained

    async def retain_each(self, refs: Sequence[BatchRef]) -> list[BatchRef]:
        """Retain several references, all or none. Returns one further reference for each. Raises as `retain`."""
        self.check()
        return await ownership.retain(self.connection, [_reference(ref) for ref in refs])

    async def stats(self, node: str | None = None) -> Stats:
        """The current statistics of this host's node, or of the member `node` of its cluster (see `members`).

        Raises PeerUnavailable if there is no such member, or it does not answer.
        """
        return Stats.of(await _told(self.connection, arguments.node(node)))

    # Streams

    async def stream(
        self,
        name: str,
        tasks: Sequence[str] | None = None,
        *,
        max_bytes: int | str | None = None,
        max_rows: int | None = None,
        max_lag: int | None = None,
        max_deliveries: int | None = None,
        replicas: int | None = None,
        group_size: int | None = None,
        durable: bool | None = None,
        history: Any = None,
    ) -> AsyncStream:
        """Open the stream with this name, or create it if it does not exist. An existing stream must have the same
        settings; None means the default. Without `tasks`, open an existing stream with any settings.

        tasks: the consumer roles. Each row is delivered to every task.
        max_bytes, max_rows: the capacity of the stream. An append waits for room.
        max_lag: the most policy versions by which an appended row may be newer than the oldest row that some task has
            not done. An append of newer rows waits.
        max_deliveries: the number of deliveries to a task without an ack after which a row is a dead letter; 5 if None.
        replicas: the number of hosts that store the columns of the rows; 1 if None. With 2, rows survive the loss of
            one host.
        group_size: the number of rows of a complete group. An append that exceeds it is refused. None: any size.
        durable: whether answered requests survive the end of every process, on the disks of nodes with a data directory
            (`dataplane node --data-dir DIR`); False if None.
        history: a history, or the result of its `following(...)`. A task `history` of the stream records rows in it by
            reference as they are done, until the stream is done or this plane is closed.

        Raises Misuse if the stream exists with other settings (the error names both), if it does not exist and no tasks
        are given, if settings are given without tasks, or if a durable stream's node has no data directory.
        """
        self.check()
        arguments.text("a stream's name", name)
        followed = histories.followed(history)
        named = histories.tasks(tasks, followed)
        wanted = arguments.settings(named, max_bytes, max_rows, max_lag, max_deliveries, replicas, group_size, durable)
        opened = await self.connection.request(rm.OpenStream(self.connection.next_id(), name, wanted), rm.Opened, 0.0)
        holds = self.connection.welcome.holds
        if wanted is not None and 0 < holds < wanted.max_bytes:
            warn(
                f"stream {name!r} never holds its max_bytes of {format_size(wanted.max_bytes)}: the node has room for"
                f" {format_size(holds)}, in memory and on disk, and appends wait when that is full; choose less, or"
                " start the node with more memory= or spill="
            )
        stream = AsyncStream(self.connection, self.writer, self._getter, name, opened)
        if followed is not None:
            stream.follower = histories.HistoryFollower(stream, followed).start()
        return stream

    async def streams(self, node: str | None = None) -> dict[str, Any]:
        """The statistics of the streams that this host's node leads, by name; or that the member `node` of its cluster
        leads. Raises as `stats`."""
        self.check()
        return await _figures(self.connection, rm.ListStreams, arguments.node(node))

    async def restore(
        self,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        replicas: int | None = None,
        timeout: float = TIMEOUT_S,
    ) -> AsyncStream:
        """Restore the stream that `stream.checkpoint` wrote to the file, with its state at that time. Returns it.

        name, replicas: of the restored stream; None: as in the file. timeout: seconds to wait for room for each part.

        No other process can open the stream before it is complete. If the restore fails or this process dies, nothing
        remains. Raises Corrupt (the file is truncated, changed, or no checkpoint of this format), Misuse (no file can
        be read there, or a stream with the name exists), Backpressure, LimitExceeded.
        """
        from dataplane.client import checkpoint  # seldom needed, and the import of all would be longer

        self.check()
        if name is not None:
            arguments.text("a stream's name", name)
        name = await checkpoint.read(self.connection, self.writer, path, name, replicas, arguments.seconds(timeout))
        asked = rm.OpenStream(self.connection.next_id(), name, None)
        opened = await self.connection.request(asked, rm.Opened, 0.0)
        return AsyncStream(self.connection, self.writer, self._getter, name, opened)

    async def replay(
        self, directory: str | os.PathLike[str], name: str | None = None, tasks: Sequence[str] | None = None, **how: Any
    ) -> AsyncStream:
        """Make a stream from a recording of `stream.record`, and return it. A thread appends the rows and then closes
        the stream. `stream.replay` reports the progress. See `docs/recording.md`.

        A repeated key is replaced by the row's unique name. name, tasks: as recorded if None. versions, columns: those
        to replay; all if None. rows: the most in one append (256). max_bytes, max_rows, max_lag, group_size: as for
        `stream`; without `max_bytes` and `max_rows`, a quarter of the node's memory.

        Raises Misuse (there is no recording, or a stream with the name exists), Corrupt, ProtocolMismatch.
        """
        from dataplane.client import replay  # imported late, as in `restore`

        self.check()
        return await replay.replay(self, directory, name, tasks, **how)

    # Tables

    def table(self, name: str, *, durable: bool | None = None) -> AsyncTable:
        """Return the table with this name. Sends no message. The first upsert creates the table; `drop` removes it.

        durable: whether an answered upsert, claim or clear survives the end of every process, on nodes with a data
            directory. With True, upserts raise Misuse if the existing table is not durable, or the node has no data
            directory. None: as the existing table; a new table is not durable.

        Raises Misuse for an invalid name.
        """
        self.check()
        arguments.text("a table's name", name)
        if len(name) > sm.MAX_SCOPE:
            raise Misuse(f"a table's name has at most {sm.MAX_SCOPE} characters, not {len(name)}")
        return AsyncTable(self.connection, self.writer, name, durable=bool(durable))

    def history(
        self,
        name: str,
        keep: int = histories.KEEP,
        max_bytes: int | str = histories.MAX_BYTES,
        *,
        samples: int = histories.SAMPLES,
        dtype: str = "int32",
        durable: bool | None = None,
    ) -> histories.AsyncHistory:
        """Return the history with this name: the responses of earlier epochs by prompt. Sends no message.

        keep, samples: a prompt has at most `keep * samples` responses, of its newest `keep` epochs.
        max_bytes: of all tokens, approximately. Beyond it, responses of the oldest epochs are removed first, and within
            an epoch those with the lowest rewards.
        dtype: of tokens, int32 or int64. durable: as for `table`. Raises Misuse.
        """
        table = self.table(f"history/{arguments.text('a name', name)}", durable=durable)
        return histories.AsyncHistory(self, table, keep, samples, max_bytes, dtype)

    def weights(self, name: str, keep: int = weights.KEEP, *, replicas: int = 1) -> weights.AsyncWeights:
        """Return the weights with this name, of which `keep` versions are kept. Sends no message. Raises Misuse.

        replicas: the number of hosts that store the bytes of each version. With 2, they survive the loss of one host.
        """
        register, chunks = (self.table(f"{kind}/{arguments.text('a name', name)}") for kind in ("weights", "chunks"))
        return weights.AsyncWeights(self, register, chunks, keep, replicas)

    async def tables(self) -> dict[str, Any]:
        """The statistics of all tables, by name: `rows`, `bytes`, `columns`, and the `tasks` that have claimed rows."""
        self.check()
        return await _figures(self.connection, rm.ListTables)

    # The cluster

    async def members(self) -> dict[str, Any]:
        """The members of the node's cluster: `members` by number, and an `epoch` that increases with every change.
        Empty for a node without a cluster."""
        return await _told(self.connection, about="members")

    # Diagnosis

    async def graphs(self) -> dict[str, Any]:
        """The performance figures that the processes of the node and its cluster have reported, as running sums.
        `dataplane.diagnosis` takes the difference of two readings. See `docs/diagnosis.md`."""
        from dataplane.client import observing  # seldom needed

        return await observing.graphs(self)

    async def diagnose(self, seconds: float = 10.0, *, role: str | None = None) -> Diagnosis:
        """Observe the processes of the job for `seconds`, and return the causes of the time that a step takes.

        role: the role whose deliveries are steps; None: the role at the end of the pipeline. Raises Misuse (no process
        consumes, or none has the role), PeerUnavailable.
        """
        from dataplane.diagnosis.diagnosis import diagnosed, watched  # seldom needed

        run = await watched(self.graphs, asyncio.sleep, arguments.seconds(seconds))
        return await asyncio.to_thread(diagnosed, run, role)

    # The end

    async def aclose(self) -> None:
        """Close the plane. Idempotent. Views stay valid; a node that this plane started ends once no process uses
        it."""
        if self._closed:
            return
        self._closed = True
        await close_each(
            lambda: background.end_all(self.connection),
            self._kept_columns.aclose,
            self.connection.refuse,
            self.pool.aclose,
            self.connection.settle,
            self.pool.shutdown,  # its threads write into memory that is given to others once the connection ends
            self.connection.close,
            lambda: self._node and self._node.retire(wait=not self.connection.pins.live),
        )

    async def __aenter__(self) -> AsyncPlane:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and not self.connection.in_child:
            warnings.warn(f"the plane at {self.address} was not closed", ResourceWarning, stacklevel=2, source=self)


async def _told(connection: Connection, node: bytes = b"", about: Any = "node") -> dict[str, Any]:
    asked = m.ReadStats(connection.next_id(), node, about)
    return (await connection.request(asked, m.Figures, 0.0)).values


async def _figures(connection: Connection, kind: type[rm.ListStreams | rm.ListTables], *more: Any) -> dict[str, Any]:
    """The statistics of all streams or tables, in as many messages as needed."""
    found: dict[str, Any] = {}
    while True:
        asked = kind(connection.next_id(), max(found, default=None), *more)
        some = (await connection.request(asked, m.Figures, 0.0)).values
        if not some:
            return found
        found |= some


def _scope(scope: Any) -> str:
    """The scope as it is sent; empty for none."""
    if scope is not None and not is_text(scope):
        raise Misuse(f"a scope is a name as text, not {scope!r}")
    return scope or ""


def _reference(ref: Any) -> BatchRef:
    if not isinstance(ref, BatchRef):
        raise Misuse(f"what was put is named by a BatchRef, not {type(ref).__name__}: pass what put() returned")
    return ref
