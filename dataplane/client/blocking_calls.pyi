"""Written by `python -m tests.stubs`; do not edit."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dataplane.batch.batch import Batch
from dataplane.batch.field import Field
from dataplane.batch.put_options import Narrow, Objects
from dataplane.batch.ref import BatchRef
from dataplane.batch.small_columns import SmallColumns
from dataplane.client.blocking import Blocking
from dataplane.client.consuming import AtEnd
from dataplane.client.delivery import DeadLetters, LostRows
from dataplane.client.draft import Spec
from dataplane.client.histories import Following, StoredResponse
from dataplane.client.recorder import Recording
from dataplane.client.sync import Appender, Delivery, Draft, History, Row, Stream, Table, Taken, Weights
from dataplane.client.table_rows import Flags, Index, Named, TableSlice
from dataplane.client.unfinished import RowToken
from dataplane.client.weight_map import Tensors
from dataplane.diagnosis.causes import Diagnosis
from dataplane.history.drafter import Drafter, Response
from dataplane.history.lengths import Lengths
from dataplane.history.scheduling import Schedule
from dataplane.observe.stats import Stats
from dataplane.stream.sampler import Sampler
from dataplane.weights.slices import Selected

class PlaneCalls(Blocking):
    """The calls of `Plane`."""

    @property
    def address(self) -> str:
        """The address for other processes of this host."""

    def put(
        self,
        columns: Any,
        *,
        scope: str | None = None,
        dedupe: Collection[str] = (),
        replicas: int = 1,
        timeout: float = 60.0,
        device: str | None = None,
        narrow: Narrow = False,
        objects: Objects = "store",
    ) -> BatchRef:
        """Store columns with equal row counts, and return a reference to them.

        columns: a mapping of names to values, a TensorDict, an Arrow table or record batch, or a Batch.
            `docs/concepts.md` says what each kind of value becomes.
        narrow: True, or names of columns: integers are stored in the narrowest dtype that holds them, and read in their
            own; `Column.narrow` gives what is stored.
        objects: "refuse": raise SchemaMismatch, naming the row, if a column would be stored as objects.
        scope: a name under which to free it later, together with others.
        dedupe: names of columns of which equal rows are stored once.
        replicas: the number of hosts that store the columns; with 2, they survive the loss of one host.
        timeout: seconds to wait for room.
        device: "keep": tensors stay on their device, in memory of this process that other processes of this host map,
            up to the `gpu_budget` of `connect`; beyond it the oldest are copied to the node's memory, and all of them
            when the plane is closed. If the process dies they are lost (OwnerDied). Not with `replicas`.

        Raises SchemaMismatch (the values cannot be columns), Backpressure (no room in time; names who holds the
        memory), LimitExceeded (more than the memory budget, or replicas without a cluster), PeerUnavailable (also if
        the cluster has fewer hosts than replicas). Cancelled, it leaves nothing behind.
        """

    def draft(self, columns: Mapping[str, Spec], *, scope: str | None = None, timeout: float = 60.0) -> Draft:
        """Reserve shared memory for columns that the caller writes in place, and then seals.

        columns: the specification of each, from `dataplane.dense` or `dataplane.ragged`. Raises as `put`, and
        SchemaMismatch if the row counts differ.
        """

    def get(
        self,
        ref: BatchRef,
        *,
        timeout: float = 60.0,
        device: Any = None,
        out: Mapping[str, Any] | None = None,
        group: Any = None,
    ) -> Batch:
        """Read the rows and columns of a reference, without a copy if they are contiguous.

        Spilled shards are read back into memory. timeout: seconds to wait for room for them.

        device: where the tensors of the batch are to be, such as "cuda": see `Batch.to`.
        out: arrays or tensors by column name, to be filled: [rows, *shape] for a dense column, all items concatenated
            for a ragged one. SchemaMismatch for another dtype or shape.
        group: a group of `torch.distributed` whose ranks all call this now, each for its own rows: see
            `dataplane.collective.get`.

        Raises Freed, OwnerDied, Corrupt, Backpressure, LimitExceeded (more at once than the memory budget),
        PeerUnavailable; Misuse if there is no such device.
        """

    def prefetch(self, ref: BatchRef, *, timeout: float = 60.0) -> None:
        """Begin to read a reference, from disk or from other hosts, so that a later `get` finds it in memory.
        Returns at once; an error is raised by the `get`. timeout: seconds to continue for."""

    def free(self, ref: BatchRef | None = None, *, scope: str | None = None) -> None:
        """Free the rows and columns of a reference, or everything put under a scope.

        Existing views stay valid. Memory is released when the last view of a shard is dropped: whole pages of the
        freed rows, and the rest with the last column of the last row. Freeing freed rows does nothing.

        Raises OwnerDied if the rows are on another node and this one is in no cluster, PeerUnavailable.
        """

    def retain(self, ref: BatchRef) -> BatchRef:
        """Make another reference to the same stored rows and columns, with an owner of its own: the rows stay until
        both references were freed, in any order. Copies nothing.

        Freeing a reference, even repeatedly, ends only its own ownership; freeing a scope ends only that of the process
        that put the rows. A row can be read by any reference to it until its last owner has freed it.

        Raises Freed if a row is gone, OwnerDied if its node has died, LimitExceeded (more rows than a message can name,
        or too many owners for the node to track), PeerUnavailable. Cancelled, it leaves nothing behind.
        """

    def retain_each(self, refs: Sequence[BatchRef]) -> list[BatchRef]:
        """As `retain`, of several references, each with an owner of its own: one message, all or none."""

    def stats(self, node: str | None = None) -> Stats:
        """The current statistics of this host's node, or of the member `node` of its cluster (see `members`).

        Raises PeerUnavailable if there is no such member, or it does not answer.
        """

    def stream(
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
    ) -> Stream:
        """Open the stream with this name, or create it if it does not exist. Without tasks, only open an existing one,
        as it is. With tasks, a setting that is None means its default; an existing stream must have been made with the
        same settings.

        tasks: the consumer roles; each row is delivered to each.
        max_bytes, max_rows: the capacity of the stream; an append waits for room.
        max_lag: how many policy versions an appended row may be newer than the oldest row that some task has not done.
        max_deliveries: the number of deliveries to a task without an ack after which a row is a dead letter; 5 if None.
        replicas: the number of hosts that store the columns of its rows; 1 if None. With 2, rows survive the loss of
            one host.
        group_size: the number of rows of each group; an append that makes a group larger is refused. None: groups of
            any size.
        durable: whether answered requests survive the end of every process, on the disks of nodes with a data directory
            (`dataplane node --data-dir DIR`); False if None.
        history: one from `plane.history`, or its `following(...)`: rows are recorded in it by reference as they are
            done, by a task `history` of the stream, until the stream is done or this plane is closed.

        Raises Misuse if the stream exists with other settings (and names both), if it does not exist and no tasks
        are given, or if it is to be durable and the node has no data directory.
        """

    def streams(self, node: str | None = None) -> dict[str, Any]:
        """The statistics of all streams of the node, by name; in a cluster, of those that it leads, or that the
        member `node` leads. Raises as `stats`."""

    def restore(self, path: str | os.PathLike[str], *, name: str | None = None, timeout: float = 60.0) -> Stream:
        """Restore the stream that `stream.checkpoint` wrote to the file, with its state at that time, under its own
        name or another. Returns the stream.

        No other process sees it before it is complete; if this fails or its process dies, nothing remains. timeout:
        seconds to wait for room for each part. Raises Corrupt (the file is truncated, changed, or no checkpoint of this
        format), Misuse (no file can be read there, or a stream with the name exists), Backpressure, LimitExceeded.
        """

    def replay(
        self, directory: str | os.PathLike[str], name: str | None = None, tasks: Sequence[str] | None = None, **how: Any
    ) -> Stream:
        """Make a stream from a recording (`stream.record`): a thread fills the stream and then closes it. See
        `docs/recording.md`. Its `replay` reports the progress. A key that occurs again gets the row's unique name.

        name, tasks: as recorded if None. versions: the policy versions to replay, one or several. columns: those to
        replay. rows: the most in one append (256). max_bytes, max_rows, max_lag, group_size: as for `stream`; a quarter
        of the node's memory without `max_bytes` and `max_rows`.

        Raises Misuse (there is no recording, or a stream with the name exists), Corrupt, ProtocolMismatch.
        """

    def table(self, name: str, *, durable: bool | None = None) -> Table:
        """The table with this name. Sends no message: the first upsert creates it, and `drop` removes it.

        durable: with True, a table that is created is durable: an answered upsert, claim or clear survives the end
        of every process, on nodes with a data directory. Upserts raise Misuse if a table with this name exists that
        is not durable, or the node has no data directory. None: as the existing table, else not durable.
        """

    def history(
        self,
        name: str,
        keep: int = 4,
        max_bytes: int | str = 1073741824,
        *,
        samples: int = 8,
        dtype: str = "int32",
        durable: bool | None = None,
    ) -> History:
        """The history with this name: responses of earlier epochs by prompt. Sends no message, as `table`.

        keep, samples: a prompt has at most `keep * samples` responses, of its newest `keep` epochs. max_bytes: of all
        tokens, approximately; beyond it, the oldest epochs are removed first, and in one epoch the lowest rewards.
        dtype: of tokens, int32 or int64. durable: as for `table`. Raises Misuse.
        """

    def weights(self, name: str, keep: int = 2, *, replicas: int = 1) -> Weights:
        """The weights with this name, of which `keep` versions are kept. Sends no message, as `table`.

        replicas: on how many hosts the bytes of each version are stored; on two, they survive the loss of one.
        Raises Misuse.
        """

    def tables(self) -> dict[str, Any]:
        """The statistics of all tables, by name: `rows`, `bytes`, `columns`, and the `tasks` that have claimed rows."""

    def members(self) -> dict[str, Any]:
        """The members of the node's cluster: an `epoch`, which increases with every change, and the `members` by
        number. Empty for a node without a cluster."""

    def graphs(self) -> dict[str, Any]:
        """The performance figures that the processes of the node and its cluster have reported. They are sums:
        `dataplane.diagnosis` takes the difference of two readings. `docs/diagnosis.md` describes them."""

    def diagnose(self, seconds: float = 10.0, *, role: str | None = None) -> Diagnosis:
        """Observe the processes of the job for `seconds`, and return why a step of the job takes as long as it does.

        role: the role whose deliveries are steps; by default the one at the end of the pipeline. Raises Misuse if no
        process consumes, or none has the role; PeerUnavailable.
        """

class StreamCalls(Blocking):
    """The calls of `Stream`."""

    def __repr__(self) -> str: ...
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
        """Append rows. Returns their keys.

        columns: as for `plane.put`, or a reference to rows that were put. From then on the stream owns the rows of a
            reference: they stay until no task needs them, even if they are freed elsewhere, and are then freed.
        keys: a text for each row, which does not begin with "~". Rows without keys get generated ones.
        group: a text or integer for each row, or one for all: the rows of one prompt, at most `group_size` of the
            stream. A row with None is in a group of its own.
        version: the policy version that made the rows, an integer for each row or one for all.
        tags: for each name a text, number or flag for each row, or one for all. Samplers read them.
        timeout: seconds to wait for room in the stream and the node; 60 if None.
        narrow: as for `plane.put`: integers are stored in the narrowest dtype that holds those of this append.
        objects: as for `plane.put`: "refuse" raises SchemaMismatch if a column would be stored as objects.

        An append that is repeated with the same keys and content while its rows are in the stream succeeds and changes
        nothing. Small appends without keys that run at the same time are merged (`client.appender`). Raises
        Backpressure (the stream is full; the error names the task that it waits for), LimitExceeded (the rows can never
        fit), Closed, SchemaMismatch, Misuse (a key exists and this append is no repetition, or a group would exceed
        `group_size`), Freed (the reference is to freed rows), OutcomeUnknown (no answer came: the rows may be appended,
        now or later). A cancelled append may have been done, too, unless it was waiting for room.
        """

    def appender(
        self, *, max_rows: int = 256, max_delay: float = 0.005, timeout: float | None = None, narrow: Narrow = False
    ) -> Appender:
        """Gathers rows of this process into blocks of `max_rows` and appends each block at once. For many rows that are
        sent one by one; see `dataplane.client.appender`.

        max_delay: seconds that a row waits for others. timeout, narrow: as for `append`, for each block.
        """

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
        """Add columns to rows, in any order of rows and stages.

        rows: a reference of a delivery, any rows selected from it, or keys. columns, narrow, objects: as for `append`,
            with a row for each. A column that a row has already is refused, unless `replace` is true, or unless `rows`
            is of a delivery, and an earlier holder of the row for the same task added it in this way and did not ack.
        timeout: seconds to wait for room in the node; 60 if None.

        Raises Misuse (a row does not exist or is named twice, or a column exists), LeaseExpired (the lease of the rows
        has ended, or they are done and gone), SchemaMismatch, Backpressure (no room in the node),
        LimitExceeded, Freed, OutcomeUnknown (no answer came: repeat it with `replace`).
        """

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
        """Lease up to `rows` rows that have all of `columns`, as soon as `min_rows` are ready. As a context manager,
        the delivery is acked at the end of the block.

        sampler: chooses among the ready rows; None: the oldest first. Any object with `choose` (`dataplane.Sampler`);
            one that is not built in runs in this process.
        member, replica, replicas: ranks that must see the same rows name the same member, and each its replica, 0 to
            replicas - 1. Each rank gets each delivery once, in the same order. A restarted rank gets the deliveries
            again that it had not acked.
        lease: seconds until the rows go to another consumer, unless they are acked or the lease is renewed.
        timeout: seconds to wait, 600 if None. After 10 s the log says why it waits.

        Raises NotReady at the deadline; Closed once the stream is closed and the task has no rows left, with the
        counts of `dead` letters and of rows that were dropped or `expired`; Misuse; LimitExceeded for more than 65,536
        rows.
        """

    def deliveries(
        self, task: str, *, prefetch: int = 1, timeout: float | None = None, at_end: AtEnd = "warn", **how: Any
    ) -> Iterator[Delivery]:
        """Iterates over deliveries until the stream is closed and the task has done all rows. Arguments as for
        `consume`.

        Each delivery is acked when the next is requested. If the loop is left by `break` or an exception, the last
        delivery is given back unless it was acked.

        lease: seconds of the lease of a delivery. When the loop's body gets the delivery, at least nine tenths of them
            are left.
        prefetch: the number of further deliveries that are leased, and fetched from other hosts, during the loop's
            body.
        timeout: seconds to wait for each delivery, from its request; 600 if None.
        at_end: the action at the end if rows of the task are dead letters, were dropped, or have expired: "warn" issues
            a `UserWarning`, "raise" raises Closed with the counts, "ignore" ends as if all were done.

        Raises as `consume`, Closed if the stream is dropped, and OutcomeUnknown if an ack was not answered: iterate
        again, and rows whose ack was not done come again.
        """

    def take(
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

    def drop_rows(self, rows: BatchRef | Sequence[str] = (), *, groups: Sequence[str | int] = ()) -> None:
        """Drop rows, and all rows of these groups: they are delivered to no task any more, and groups count as complete
        without them. Current holders may finish. Raises Misuse for a row or group that does not exist."""

    def dead_letters(self, task: str, *, most: int = 1024) -> DeadLetters:
        """The first rows that were delivered to this task `max_deliveries` times without an ack: they were given back,
        or their lease expired. They stay in the stream until they are dropped, or done after a `retry`."""

    def retry(self, task: str, keys: Sequence[str] | None = None) -> int:
        """Make dead letters of this task pending again, as if they had never been delivered to it. Returns how many
        there were.

        keys: those of `dead_letters`, or some of them. None: all dead letters of the task, at most 65,536 in one call.
            Rows that are not dead letters of the task are left as they are. If the stream has a `group_size`, or the
            task has taken whole groups, the other dead letters of their groups are retried too.

        Raises Misuse for a task or row that does not exist.
        """

    def lost(self, task: str | None = None) -> LostRows:
        """Report the rows that were lost because a host with some of their columns died: each once, to the first
        caller. They can be appended again. Consumers that hold such rows get `OwnerDied` when they read them. If all
        hosts with the metadata of the rows died, their keys are unknown: `unnamed` has their number for each live node
        whose clients appended them.

        task: leave out rows that this task had acked; they are never reported. Raises Misuse for an unknown task.
        """

    def begin(
        self,
        key: str | None = None,
        *,
        group: str | int | None = None,
        version: int = 0,
        tags: Mapping[str, Any] | None = None,
        columns: Mapping[str, Any] | None = None,
        tokens: str = "response_ids",
        lease: float = 600.0,
        timeout: float | None = None,
    ) -> Row:
        """Begin a row that is appended piece by piece. It counts as a row of the stream and of its group from now on,
        and is delivered to no task before it is finished. As a context manager it is finished at the end of the block,
        and released if an exception leaves the block.

        key, group, version, tags, timeout: as for `append`, of one row.
        columns: a mapping of those that the row has from the start, such as its prompt, each of one row.
        tokens: the ragged column whose lengths are the numbers of tokens in `version_spans`.
        lease: seconds without a piece or a renewal after which another process may resume the row. If the holder's
            process ends, another may resume it at once.

        Raises as `append`.
        """

    def unfinished(self) -> list[RowToken]:
        """The rows in progress, the oldest first; at most 4,096."""

    def resume(self, key: str | None = None, *, lease: float = 600.0) -> Row | None:
        """Take over a row in progress, and continue after its last piece: the row with this key or, without a key, the
        one that was begun first among those without a holder; None if there is none. If several call at once, one gets
        it. Raises LeaseExpired, for a key, if another process holds it, or it is no longer in progress."""

    def stats(self) -> Mapping[str, Any]:
        """Statistics of the stream: see `docs/operations.md`."""

    def checkpoint(self, path: str | os.PathLike[str], *, timeout: float = 60.0) -> None:
        """Write the stream to a file for `plane.restore`: its rows, their columns, and the progress of each task.

        The stream stays in use meanwhile; later changes are not in the file. Leased rows will be ready again. An
        existing file is replaced only once the new one is completely on disk. timeout: seconds to wait for memory to
        read each part of spilled columns.

        Raises Misuse (no file can be written there), LimitExceeded (the disk is full), Backpressure, Lost, LeaseExpired
        (the leader changed meanwhile), Closed (the stream was dropped).
        """

    def record(self, directory: str | os.PathLike[str], columns: Sequence[str] | None = None, **how: Any) -> Recording:
        """Begin to record rows as they are done, each once, to a directory of Parquet files: see `docs/recording.md`.

        columns: the columns to record; a row is done when it has all of them. None: the columns that the rows have once
            every other task has acked one row.
        task: the task of the stream by which the recorder consumes ("record"). rows: the most in one delivery (256).
        max_file_bytes: the most in one file, before compression ("256MiB"). media: columns of which equal values are
            stored once, in addition to those that are found automatically.
        compression: "zstd", "snappy", "lz4" or "none". on_full: while the disk is full, "skip" skips rows, counts them
            and logs that; "wait" leaves them in the stream.

        Raises Misuse. The recording's `wait` and `close` raise later errors.
        """

    def close(self) -> None:
        """Refuse further appends. Consumers go on until all rows are done. Idempotent."""

    def drop(self) -> None:
        """Free the stream with all rows, delivered or not. Waiting calls raise `Closed`."""

class DeliveryCalls(Blocking):
    """The calls of `Delivery`."""

    def __len__(self) -> int: ...
    def __repr__(self) -> str: ...
    def get(self, *columns: str, timeout: float = 60.0) -> Batch:
        """Read the rows, or these columns of them. Raises as `Plane.get`."""

    def ack(self) -> None:
        """Acknowledge the rows: the task is done with them. Raises LeaseExpired if some went to another consumer
        (none of the rows are acked then), or if they were given back; OutcomeUnknown if the node or the leader answered
        neither this nor a repetition: ack again. Does nothing if they were acked before."""

    def nack(self, reason: str = "") -> None:
        """Give the rows back, to be delivered again. If this makes them dead letters, `dead_letters` and the node's log
        have the reason. Does nothing if they were given back before. Raises LeaseExpired, also if they were acked."""

    def renew(self) -> None:
        """Renew the lease for its original duration. Raises LeaseExpired."""

    def split(self, shards: int | None = None, *, equal: bool = True) -> list[BatchRef]:
        """Split the rows over `shards` ranks: balanced by tokens if the sampler was `TokenBalanced`, else in contiguous
        runs. With `equal` the numbers of rows differ by at most one.

        Reads no column.
        """

    def rows_of(self, shards: int | None = None, *, equal: bool = True) -> list[npt.NDArray[np.int64]]:
        """The positions of the rows that `split` gives each rank."""

class DraftCalls(Blocking):
    """The calls of `Draft`."""

    def __getitem__(self, name: str) -> Any:
        """The column's memory: [rows, ...] for a dense column, a list of [length, ...] for a ragged one.

        A dtype that NumPy lacks (bfloat16, float8) is exposed as unsigned integers with the same bits; `torch(name)`
        returns the real dtype. Raises SchemaMismatch if there is no such column, Closed after the draft was dropped.
        """

    def __iter__(self) -> Iterator[str]: ...
    def torch(self, name: str) -> Any:
        """As `draft[name]`, as torch tensors. Imports torch."""

    def seal(self) -> BatchRef:
        """Make the columns visible to others, and return their reference. They do not change any more: arrays that were
        taken from the draft become private copies. Raises LeaseExpired, Closed, PeerUnavailable."""

class TakenCalls(Blocking):
    """The calls of `Taken`."""

    def __len__(self) -> int: ...
    def __getitem__(self, rank: Any) -> Any: ...
    def ack(self) -> None:
        """As `Delivery.ack`."""

    def nack(self, reason: str = "") -> None:
        """As `Delivery.nack`."""

class RowCalls(Blocking):
    """The calls of `Row`."""

    def __repr__(self) -> str: ...
    def append(self, columns: Any, *, version: int | None = None, timeout: float | None = None) -> None:
        """Append a piece: columns of one row, as for `stream.append`, or a reference to such a row. version: the
        policy version that made it; None: that of the piece before. timeout: seconds to wait for room in the node, 60
        if None. Pieces may have different columns.

        Only ragged columns are joined. A text column, as any other, is that of its last piece: pieces of text replace
        each other; append tokens, or the whole text with the last piece.

        An append whose outcome is unknown can be repeated with the same arguments: it is done once. Raises
        LeaseExpired (another has resumed the row, or it was dropped or lost: the piece does not count),
        SchemaMismatch, Backpressure (no room in the node), LimitExceeded, Misuse, OutcomeUnknown (no answer came).
        """

    def finish(self, *, stale_share: float = 0.0, timeout: float | None = None) -> None:
        """Finish the row: from now on it is delivered to tasks, with a column `version_spans`.

        stale_share: sets the row's policy version, which `max_lag` and samplers use: the newest version such that at
        most this share of the row's tokens is older. 0: the version of its oldest token.

        May be repeated. Raises as `append`, and Misuse if the row was abandoned here.
        """

    def abandon(self) -> None:
        """Drop the row with all its pieces. In its group it counts as dropped. May be repeated. Raises LeaseExpired;
        Misuse if the row was finished here."""

    def renew(self) -> None:
        """Renew the lease, as each piece does. Raises LeaseExpired."""

    def release(self) -> None:
        """Release the row: the next process that resumes it continues it. Does nothing if another process holds it. A
        later call of this object takes the row back, unless another process has resumed it."""

    def ref(self) -> BatchRef:
        """The row as it is now, with all columns of its pieces; `finish` adds `version_spans`. Raises LeaseExpired."""

    def get(self, *columns: str, timeout: float = 60.0) -> Batch:
        """Read the row as it is now, or these columns of it. Raises as `Plane.get`, LeaseExpired."""

class AppenderCalls(Blocking):
    """The calls of `Appender`."""

    def __repr__(self) -> str: ...
    @property
    def pending(self) -> int:
        """Rows that were sent and not answered."""

    def flush(self) -> None:
        """Append all accepted rows without further delay, and wait until they are in the stream. Raises the first error
        that no awaiting caller got; drops later ones."""

class TableCalls(Blocking):
    """The calls of `Table`."""

    def __repr__(self) -> str: ...
    def upsert(
        self,
        rows: Named,
        columns: Any = None,
        *,
        tags: Sequence[Mapping[str, Any]] | None = None,
        dedupe: Collection[str] = (),
        stored: Callable[[BatchRef], object] | None = None,
        timeout: float = 60.0,
        narrow: Narrow = False,
    ) -> Index:
        """Write these columns to rows; returns the rows' numbers. Missing rows are created, and must be named by
        keys. In existing rows, columns of the same name are replaced, and the old ones freed.

        columns: as for `plane.put`, or a reference to rows that were put, which the table owns from then on. In a
            mapping, a value may be a reference to a column of a table; it stays until no row of a table needs it. None:
            only keys and tags.
        tags: a mapping for each row, of values that MessagePack holds; each replaces the row's tag of the same name.
        dedupe: names of columns of which equal rows are stored once.
        stored: called with a reference to the columns once the table owns them.
        timeout: seconds to wait for room.
        narrow: as for `plane.put`: which integers are stored in the narrowest dtype that holds those of this write.

        More than 65,536 rows are written in several steps. Raises SchemaMismatch (these are no columns, or not those of
        the table), Misuse, Backpressure, LimitExceeded, Freed (a reference is to freed rows), PeerUnavailable,
        OutcomeUnknown (no answer came: write the same again).
        """

    def upsert_and_look(
        self,
        rows: Named,
        columns: Any = None,
        *,
        tags: Sequence[Mapping[str, Any]] | None = None,
        dedupe: Collection[str] = (),
        stored: Callable[[BatchRef], object] | None = None,
        timeout: float = 60.0,
        narrow: Narrow = False,
    ) -> tuple[TableSlice, list[str]]:
        """As `upsert`. Returns the rows as `look` does afterwards, for all columns of the table, and the names of the
        columns. One message instead of three (write, schema, look)."""

    def numbers(self, keys: Sequence[str], *, create: bool = False) -> Index:
        """Return the numbers of the rows with these keys. `create`: create missing rows, without columns. Raises Misuse
        for an unknown key."""

    def keys(self, numbers: Index | Sequence[int]) -> list[str]:
        """The keys of these rows. Raises Misuse for a row that does not exist."""

    def read(self, rows: Named, columns: Sequence[str] | None = None) -> BatchRef:
        """A reference to these columns of these rows, in this order; without `columns`, to all that each of them
        has. It refers to the current values: if they are replaced or cleared before they are read, reading raises
        `Freed`. Raises Misuse for a row that does not exist or lacks a column."""

    def schema(self) -> dict[str, Field]:
        """The type of each column, by name."""

    def look(
        self,
        rows: Named | None = None,
        *,
        columns: Sequence[str] = (),
        tags: bool = True,
        since: int = 0,
        missing_ok: bool = False,
    ) -> TableSlice:
        """The keys and tags of these rows, or of all in the order of arrival, and which of these columns each
        has. `since`: the `changes` of an earlier look; if the table has not changed since then, no rows are
        returned. Raises Misuse for a key that does not exist; with `missing_ok` it is left out."""

    def ready(
        self,
        columns: Sequence[str],
        *,
        task: str | None = None,
        claim_id: str | None = None,
        least: int = 1,
        timeout: float = 0.0,
    ) -> Index:
        """Wait until at least `least` rows are ready, and return all ready rows in the order of arrival. A row is
        ready if it has all these columns and the task has not claimed it. With a `claim_id` that was used before: the
        rows given under it, at once.

        timeout: seconds to wait, without polling. Raises NotReady at the deadline.
        """

    def claim(
        self,
        task: str,
        numbers: Index | Sequence[int],
        *,
        give: Index | Sequence[int] | None = None,
        claim_id: str | None = None,
    ) -> Index | None:
        """Mark these rows as claimed by the task, all or none. Returns their numbers, or None if one of them was
        claimed meanwhile or is gone: then choose again.

        claim_id: a name for this choice. A call with the id of an earlier claim claims nothing and returns the rows
            given under it: so ranks that must see the same rows use the same id, and a call whose answer was lost can
            be repeated.
        give: the rows to return under this id, if they differ from the claimed ones.
        """

    def find_claim(self, task: str, claim_id: str) -> Index | None:
        """The rows given to the task under this id; None if no claim had it."""

    def release(self, task: str | None = None, numbers: Index | Sequence[int] | None = None) -> None:
        """Undo claims. The ids under which these rows were given are forgotten.

        task: whose claims are undone; those of all tasks if None.
        numbers: the rows whose claims are undone; all rows if None.
        """

    def claimed(self, task: str, numbers: Index | Sequence[int] | None = None) -> Flags:
        """Whether the task has claimed each of these rows, or of all in the order of arrival. Raises Misuse for a row
        that does not exist."""

    def clear(self, rows: Named) -> None:
        """Remove these rows with their columns, tags and numbers. Rows that do not exist are ignored."""

    def drop(self) -> None:
        """Remove all rows and claims. A later write to the name creates another table."""

    def _put_row(
        self, key: str, row: SmallColumns, references: Mapping[str, BatchRef], tags: Any = None
    ) -> tuple[TableSlice, list[str]]:
        """As `upsert_and_look`, of a row whose small columns are laid out already (`batch.small_columns`), in one
        message without a plan. references: further columns that are in a table already, each a reference of one row
        and one column."""

class HistoryCalls(Blocking):
    """The calls of `History`."""

    def __repr__(self) -> str: ...
    def add(self, key: str, tokens: Any, *, epoch: int = 0, reward: float | None = None, timeout: float = 60.0) -> None:
        """Add a response to the prompt with this key. An empty response is ignored.

        tokens: the token ids, a flat sequence or a one-dimensional array. epoch: that of training, or the policy's
        version; higher is newer. reward: drafts prefer responses with higher rewards. timeout: seconds to wait for
        room. Raises Misuse, SchemaMismatch, Backpressure, PeerUnavailable.
        """

    def record(
        self,
        ref: BatchRef,
        *,
        key: str | Sequence[str] = "key",
        tokens: str = "response_ids",
        epoch: int | Sequence[int] = 0,
        reward: str | Sequence[float | None] | None = None,
        timeout: float = 60.0,
    ) -> None:
        """Add the responses in these rows. If their tokens are a ragged column with the history's dtype, they are
        added by reference: nothing is copied, and they stay as long as the history needs them, even if the rows are
        freed. Others are copied, with the history's dtype.

        key, reward: the columns with the prompt's key and the reward, or a value for each row. tokens: the column of
        token ids. epoch: as for `add`, one for all rows or for each. Raises as `add`, and Freed or OwnerDied if the
        rows are gone.
        """

    def follow(
        self,
        stream: Stream,
        *,
        task: str = "history",
        tokens: str = "response_ids",
        key: str | None = None,
        reward: str | None = None,
        rows: int = 256,
    ) -> int:
        """Record the rows of a stream by reference as they are done, as one of its tasks, until it closes. Returns the
        number of rows.

        The epoch of a row is its policy version. `key`: the column with the prompt's key; None: a row's group is the
        key, and rows without a group are not recorded. `reward`: the column with the reward; rows are recorded once
        they have it.
        """

    def following(
        self, *, task: str = "history", tokens: str = "response_ids", key: str | None = None, reward: str | None = None
    ) -> Following:
        """The argument of `plane.stream(history=...)` for a stream with other columns. Arguments as for `follow`."""

    def known(self, keys: Sequence[str]) -> list[list[StoredResponse]]:
        """The metadata of the responses to each of these prompts, in its newest `keep` epochs, the oldest first.
        Reads no token."""

    def responses(self, key: str) -> list[Response]:
        """The existing responses to this prompt, the oldest epoch first; tokens as int32, not copied if the history
        has that dtype."""

    def drafter(self, key: str, *, max_tokens: int = 64) -> Drafter:
        """A drafter, which proposes the tokens of a new response to this prompt, from its first token on.

        max_tokens: the most in one draft. Without earlier responses it proposes nothing. Raises PeerUnavailable, and
        Misuse if the extension for drafts was not built.
        """

    def lengths(self, keys: Sequence[str]) -> Lengths:
        """Predict the lengths of responses to these prompts, each with the error of the prediction: see
        `history.lengths`."""

    def schedule(
        self, keys: Sequence[str], workers: int, *, step: int = 0, samples: int = 1, slots: int | None = None
    ) -> Schedule:
        """Assign the responses to these prompts to workers, in an order: see `history.scheduling.plan`."""

    def drop(self) -> None:
        """Remove all responses."""

class WeightsCalls(Blocking):
    """The calls of `Weights`."""

    def __repr__(self) -> str: ...
    def publish(self, version: int, tensors: Any, *, rank: int = 0, ranks: int = 1, timeout: float = 60.0) -> None:
        """Publish a version, or one rank's part of it. Readers see it once all `ranks` have published theirs.

        version: an integer; higher is newer. It must be higher than the newest complete one.
        tensors: a mapping of names to tensors, or an iterable (also an asynchronous one) of (name, tensor), of which at
            most 256 MiB are held at a time. Each is a `torch.Tensor` with any device, strides and dtype except sparse
            and quantized ones, an array, a `DTensor`, of which each rank publishes its local shard, or a
            `dataplane.weights.Slice` of a tensor. Tensors of the same memory (tied ones) are stored once.
        rank, ranks: the number of this publisher, and how many publish this version. A rank whose tensors are all
            empty, or all published by other ranks, publishes an empty part.
        timeout: seconds to wait for room.

        When it returns, the tensors may be changed. Raises Misuse (no tensor, a name given twice, a version that is not
        new), SchemaMismatch (a value that is no tensor), Backpressure, LimitExceeded, PeerUnavailable; OutcomeUnknown:
        publish it again, and if that raises Misuse because the version is complete, it was published. A publication
        that failed otherwise or was cancelled is invisible; its data is removed at once, or with the next complete
        version.
        """

    def get(
        self,
        version: int | str | None = None,
        *,
        names: Sequence[str] | None = None,
        slices: Mapping[str, Selected] | None = None,
        timeout: float = 60.0,
    ) -> Tensors:
        """Map the tensors of a version. Returns a mapping by name, with its `version`. All processes of a host map the
        same bytes, and each host fetches only the wanted bytes, once.

        version: None: the newest complete one; a number: that one; ">= 7": the newest, from 7 on.
        names: the wanted tensors; all, if None.
        slices: by name, the wanted part of a tensor: for each dimension a slice (of step 1), (start, stop) or None.
            Tensors that are not named here are wanted as a whole.
        timeout: seconds to wait for the version, and for room.

        Later versions do not change the mapping. Its memory is kept until it and all of its tensors are gone. Raises
        NotReady (no such version in time), Freed (it is older than those that are kept), Misuse (a tensor, or a part of
        one, that was not published), OwnerDied, Backpressure, PeerUnavailable.
        """

    def versions(self) -> list[int]:
        """The complete versions, the oldest first."""

    def newer(self, than: int | None = None, *, timeout: float = 60.0) -> int:
        """Wait until a complete version is newer than `than` (None: until there is one), and return the newest. Raises
        NotReady."""

    def watch(self, after: int | None = None, *, timeout: float | None = None) -> Iterator[int]:
        """Iterate over the newest complete version, and each newer one as soon as it is complete. A slow caller gets
        only the newest.

        after: only versions newer than this one.
        timeout: seconds to wait for each version; None: no limit. Raises NotReady at the deadline.
        """

    def drop(self) -> None:
        """Remove all versions. A process that has mapped one keeps it."""
