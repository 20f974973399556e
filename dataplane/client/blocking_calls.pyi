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

    def draft(self, columns: Mapping[str, Spec], *, scope: str | None = None, timeout: float = 60.0) -> Draft:
        """Reserve shared memory for columns that the caller writes in place. Returns the draft, to be sealed.

        columns: the specification of each column, from `dataplane.dense` or `dataplane.ragged`. scope, timeout: as for
        `put`. Raises as `put`, and SchemaMismatch if the row counts differ or the draft would be empty.
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

    def prefetch(self, ref: BatchRef, *, timeout: float = 60.0) -> None:
        """Begin to read a reference from disk or other hosts, so that a later `get` finds the rows in memory.
        Returns at once; the later `get` raises an error. timeout: seconds after which the prefetch is given up."""

    def free(self, ref: BatchRef | None = None, *, scope: str | None = None) -> None:
        """Free the rows and columns of a reference, or everything put under a scope. Freeing freed rows does nothing.

        Existing views stay valid. Once the last view of a shard is dropped, the whole pages of its freed rows are
        released. The rest of the shard is released when all of its rows and columns are freed.

        Raises OwnerDied if the rows are on another node and this node is in no cluster, Misuse, PeerUnavailable;
        OutcomeUnknown if a node of the rows does not answer, or is away and may come back: free the reference again.
        """

    def retain(self, ref: BatchRef) -> BatchRef:
        """Return a further reference to the same stored rows and columns, as a separate owner. Copies nothing.

        The rows stay until every owner has freed its reference, in any order. Until then, any reference reads them.
        Freeing a reference, even repeatedly, ends only its own ownership. Freeing a scope ends only the ownership of
        the references that `put` returned.

        Raises Freed (a row was freed), OwnerDied (the row's node died), LimitExceeded (more rows than a message can
        name, or too many owners for the node to track), PeerUnavailable. A cancelled retain has retained nothing.
        """

    def retain_each(self, refs: Sequence[BatchRef]) -> list[BatchRef]:
        """Retain several references, all or none. Returns one further reference for each. Raises as `retain`."""

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

    def streams(self, node: str | None = None) -> dict[str, Any]:
        """The statistics of the streams that this host's node leads, by name; or that the member `node` of its cluster
        leads. Raises as `stats`."""

    def restore(
        self,
        path: str | os.PathLike[str],
        *,
        name: str | None = None,
        replicas: int | None = None,
        timeout: float = 60.0,
    ) -> Stream:
        """Restore the stream that `stream.checkpoint` wrote to the file, with its state at that time. Returns it.

        name, replicas: of the restored stream; None: as in the file. timeout: seconds to wait for room for each part.

        No other process can open the stream before it is complete. If the restore fails or this process dies, nothing
        remains. Raises Corrupt (the file is truncated, changed, or no checkpoint of this format), Misuse (no file can
        be read there, or a stream with the name exists), Backpressure, LimitExceeded.
        """

    def replay(
        self, directory: str | os.PathLike[str], name: str | None = None, tasks: Sequence[str] | None = None, **how: Any
    ) -> Stream:
        """Make a stream from a recording of `stream.record`, and return it. A thread appends the rows and then closes
        the stream. `stream.replay` reports the progress. See `docs/recording.md`.

        A repeated key is replaced by the row's unique name. name, tasks: as recorded if None. versions, columns: those
        to replay; all if None. rows: the most in one append (256). max_bytes, max_rows, max_lag, group_size: as for
        `stream`; without `max_bytes` and `max_rows`, a quarter of the node's memory.

        Raises Misuse (there is no recording, or a stream with the name exists), Corrupt, ProtocolMismatch.
        """

    def table(self, name: str, *, durable: bool | None = None) -> Table:
        """Return the table with this name. Sends no message. The first upsert creates the table; `drop` removes it.

        durable: whether an answered upsert, claim or clear survives the end of every process, on nodes with a data
            directory. With True, upserts raise Misuse if the existing table is not durable, or the node has no data
            directory. None: as the existing table; a new table is not durable.

        Raises Misuse for an invalid name.
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
        """Return the history with this name: the responses of earlier epochs by prompt. Sends no message.

        keep, samples: a prompt has at most `keep * samples` responses, of its newest `keep` epochs.
        max_bytes: of all tokens, approximately. Beyond it, responses of the oldest epochs are removed first, and within
            an epoch those with the lowest rewards.
        dtype: of tokens, int32 or int64. durable: as for `table`. Raises Misuse.
        """

    def weights(self, name: str, keep: int = 2, *, replicas: int = 1) -> Weights:
        """Return the weights with this name, of which `keep` versions are kept. Sends no message. Raises Misuse.

        replicas: the number of hosts that store the bytes of each version. With 2, they survive the loss of one host.
        """

    def tables(self) -> dict[str, Any]:
        """The statistics of all tables, by name: `rows`, `bytes`, `columns`, and the `tasks` that have claimed rows."""

    def members(self) -> dict[str, Any]:
        """The members of the node's cluster: `members` by number, and an `epoch` that increases with every change.
        Empty for a node without a cluster."""

    def graphs(self) -> dict[str, Any]:
        """The performance figures that the processes of the node and its cluster have reported, as running sums.
        `dataplane.diagnosis` takes the difference of two readings. See `docs/diagnosis.md`."""

    def diagnose(self, seconds: float = 10.0, *, role: str | None = None) -> Diagnosis:
        """Observe the processes of the job for `seconds`, and return the causes of the time that a step takes.

        role: the role whose deliveries are steps; None: the role at the end of the pipeline. Raises Misuse (no process
        consumes, or none has the role), PeerUnavailable.
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

    def appender(
        self, *, max_rows: int = 256, max_delay: float = 0.005, timeout: float | None = None, narrow: Narrow = False
    ) -> Appender:
        """Return an appender, which gathers rows that are sent one by one into blocks and appends each block at once.
        See `dataplane.client.appender`.

        max_rows: the number of rows at which a block is full. max_delay: seconds that a block waits for further rows.
        timeout, narrow: as for `append`, for each block.
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

    def deliveries(
        self, task: str, *, prefetch: int = 1, timeout: float | None = None, at_end: AtEnd = "warn", **how: Any
    ) -> Iterator[Delivery]:
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
        """Lease the rows of one synchronous training step, and split them over ranks. Returns one reference for each
        rank, to be acked together. Reads no column.

        rows: the number of rows; fewer if `min_rows` is less or whole groups do not fill it. shards: the number of
        ranks. With `TokenBalanced`, ranks get about equally many tokens. Other arguments and errors: as for `consume`.
        """

    def drop_rows(self, rows: BatchRef | Sequence[str] = (), *, groups: Sequence[str | int] = ()) -> None:
        """Drop these rows, and all rows of these groups. Dropped rows are not delivered again, and groups are complete
        without them. Current holders may finish. Raises Misuse for a row or group that does not exist."""

    def dead_letters(self, task: str, *, most: int = 1024) -> DeadLetters:
        """The first `most` rows that were delivered to this task `max_deliveries` times without an ack. They stay in
        the stream until they are dropped, or done after a `retry`. Raises Misuse for an unknown task."""

    def retry(self, task: str, keys: Sequence[str] | None = None) -> int:
        """Make dead letters of this task pending again, with no deliveries counted. Returns the number of retried rows.

        keys: keys from `dead_letters`; None: all dead letters of the task, at most 65,536 in one call. Other rows are
            left as they are. If the stream has a `group_size`, or the task has taken whole groups, the other dead
            letters of the same groups are retried too.

        Raises Misuse for a task or row that does not exist.
        """

    def lost(self, task: str | None = None) -> LostRows:
        """Return the rows that were lost because a host with some of their columns died. Each is reported once, to the
        first caller, and can be appended again. A consumer that reads a lost row gets `OwnerDied`. If all hosts with
        the metadata of the rows died, their keys are unknown. `unnamed` then has their number, by the live node whose
        clients appended them.

        task: leave out rows that this task had acked. They are not reported later either. Raises Misuse for an unknown
        task.
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

    def unfinished(self) -> list[RowToken]:
        """The unfinished rows, the oldest first; at most 4,096."""

    def resume(self, key: str | None = None, *, lease: float = 600.0) -> Row | None:
        """Take over an unfinished row, to continue after its last piece. Returns the row. Without a key, it is the
        oldest row without a holder, or None if there is none. Only one of several callers gets a row. Raises
        LeaseExpired if another process holds the row with this key, or it is not unfinished."""

    def stats(self) -> Mapping[str, Any]:
        """Statistics of the stream: see `docs/operations.md`."""

    def checkpoint(self, path: str | os.PathLike[str], *, timeout: float = 60.0) -> None:
        """Write the rows, their columns, and the progress of each task to a file for `plane.restore`.

        The stream can be used meanwhile; later changes are not in the file. In the restored stream, leased rows are
        ready. An existing file is replaced once the new file is completely on disk. timeout: seconds to wait for memory
        to read each part of spilled columns.

        Raises Misuse (no file can be written there), LimitExceeded (the disk is full), Backpressure, Lost, LeaseExpired
        (the leader changed meanwhile), Closed (the stream was dropped).
        """

    def record(self, directory: str | os.PathLike[str], columns: Sequence[str] | None = None, **how: Any) -> Recording:
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

    def close(self) -> None:
        """Refuse further appends. Consumers still get the remaining rows. Idempotent."""

    def drop(self) -> None:
        """Remove the stream and free all of its rows, also leased ones. Waiting calls raise `Closed`."""

class DeliveryCalls(Blocking):
    """The calls of `Delivery`."""

    def __len__(self) -> int: ...
    def __repr__(self) -> str: ...
    def get(self, *columns: str, timeout: float = 60.0) -> Batch:
        """Read the rows, or these columns of them. timeout: seconds to wait for memory. Raises as `Plane.get`, and
        SchemaMismatch for a column that was not consumed."""

    def ack(self) -> None:
        """Acknowledge the rows: the task is done with them. Does nothing if they were acked before.

        Raises LeaseExpired if the lease has ended, even if no other consumer has the rows. Also if the rows were given
        back, or some of them were lost with their host. None is acked then.
        Raises OutcomeUnknown if neither the ack nor a repetition was answered. The call can then be repeated."""

    def nack(self, reason: str = "") -> None:
        """Give the rows back, to be delivered again. Does nothing if they were given back before. If the rows become
        dead letters, `dead_letters` and the node's log have the reason.

        Raises LeaseExpired if the lease has ended or the rows were acked, Misuse if the reason is no text. A repetition
        of a cancelled call may raise LeaseExpired too: the rows have been given back."""

    def renew(self) -> None:
        """Renew the lease for its original duration. Raises LeaseExpired if it has ended or the rows were settled."""

    def split(self, shards: int | None = None, *, equal: bool = True) -> list[BatchRef]:
        """Split the rows over `shards` ranks. Returns a reference for each rank. Reads no column.

        With a `TokenBalanced` sampler, ranks get about equally many tokens, and with `equal` numbers of rows that
        differ by at most one. None means the sampler's `shards`. With any other sampler, ranks get contiguous runs of
        about equal length, and None means one rank.
        """

    def rows_of(self, shards: int | None = None, *, equal: bool = True) -> list[npt.NDArray[np.int64]]:
        """The positions of the rows that `split` gives each rank."""

class DraftCalls(Blocking):
    """The calls of `Draft`."""

    def __getitem__(self, name: str) -> Any:
        """The column's memory: [rows, ...] for a dense column, a list of arrays [length, ...] for a ragged one.

        A dtype that NumPy lacks (bfloat16, float8) is exposed as unsigned integers with the same bits; `torch(name)`
        has the real dtype. Raises SchemaMismatch if there is no such column, Closed if the draft was sealed or dropped.
        """

    def __iter__(self) -> Iterator[str]: ...
    def torch(self, name: str) -> Any:
        """The column's memory as a torch tensor, or a list of tensors for a ragged column. Raises as `draft[name]`."""

    def seal(self) -> BatchRef:
        """Make the columns immutable and visible to other processes. Returns a reference to them. Later writes to
        arrays of the draft stay private to this process. Raises LeaseExpired, PeerUnavailable, and Closed if the draft
        was sealed or dropped before."""

class TakenCalls(Blocking):
    """The calls of `Taken`."""

    def __len__(self) -> int: ...
    def __getitem__(self, rank: Any) -> Any: ...
    def ack(self) -> None:
        """Acknowledge all rows. Raises as `Delivery.ack`."""

    def nack(self, reason: str = "") -> None:
        """Give all rows back. Raises as `Delivery.nack`."""

class RowCalls(Blocking):
    """The calls of `Row`."""

    def __repr__(self) -> str: ...
    def append(self, columns: Any, *, version: int | None = None, timeout: float | None = None) -> None:
        """Append a piece to the row.

        columns: as for `stream.append`, with one row, or a reference to one row. Pieces may have different columns.
        version: the policy version that made the piece; None: that of the previous piece.
        timeout: seconds to wait for room in the node; 60 if None.

        Only ragged columns are concatenated. In any other column, such as text, a piece replaces the previous one. So
        append tokens, or the whole text with the last piece.

        An append whose outcome is unknown can be repeated with the same arguments, and is done once. Raises
        LeaseExpired (another process has resumed the row, or the row was dropped or lost; the piece does not count),
        SchemaMismatch, Backpressure (no room in the node), LimitExceeded, Misuse, OutcomeUnknown (no answer came).
        """

    def finish(self, *, stale_share: float = 0.0, timeout: float | None = None) -> None:
        """Finish the row, so that it is delivered to tasks, with the column `version_spans`. May be repeated.

        stale_share: sets the row's policy version, for `max_lag` and samplers, to the newest version such that at most
            this share of the row's tokens is older. 0: the version of the oldest token.

        timeout: as for `append`. Raises as `append`, and Misuse if this object has abandoned the row.
        """

    def abandon(self) -> None:
        """Drop the row with all its pieces. Its group counts it as dropped. May be repeated. Raises LeaseExpired;
        Misuse if this object has finished the row."""

    def renew(self) -> None:
        """Renew the lease without a piece. Raises LeaseExpired; Misuse if the row has ended."""

    def release(self) -> None:
        """Release the row, so that another process can resume it at once. A later call of this object takes the row
        back, unless another process has resumed it. Errors are ignored, for instance that another process holds it."""

    def ref(self) -> BatchRef:
        """Return a reference to the current row, with all columns of its pieces, but without `version_spans`. Raises
        LeaseExpired; Misuse if the row has ended."""

    def get(self, *columns: str, timeout: float = 60.0) -> Batch:
        """Read the current row, or these columns of it. Raises as `Plane.get`, and as `ref`."""

class AppenderCalls(Blocking):
    """The calls of `Appender`."""

    def __repr__(self) -> str: ...
    @property
    def pending(self) -> int:
        """Rows that were sent and not answered."""

    def flush(self) -> None:
        """Append all accepted rows without further delay, and wait until they are in the stream. Raises the first error
        that was not raised to a caller yet; further errors are dropped."""

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
        """Write columns and tags to rows. Returns the rows' numbers. Missing rows are created, and must be named by
        keys. In existing rows, columns of the same name are replaced, and the old ones freed.

        columns: as for `plane.put`, or a reference to rows that were put, which the table then owns. In a mapping, a
            value may be a reference to one column of a table; its memory is kept until no row refers to it. None: only
            tags are written.
        tags: a mapping for each row, of values that MessagePack holds. A tag replaces the row's tag of the same name.
        dedupe: names of columns whose equal rows are stored once.
        stored: a function that is called with a reference to the columns once the table owns them.
        timeout: seconds to wait for room.
        narrow: as for `plane.put`. The dtype is the narrowest for the integers of this write.

        A write of more than 65,536 rows has several steps. Raises SchemaMismatch (the values are no columns, or differ
        from the table's), Misuse, Backpressure, LimitExceeded, Freed (a reference is to freed rows), PeerUnavailable,
        OutcomeUnknown (no answer came: repeat the write).
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
        """Write as `upsert`. Returns the rows as a later `look` at all columns of the table would, and the names of the
        columns. Takes one message instead of three (upsert, schema, look)."""

    def numbers(self, keys: Sequence[str], *, create: bool = False) -> Index:
        """Return the numbers of the rows with these keys. `create`: whether missing rows are created, without columns.
        Otherwise, an unknown key raises Misuse."""

    def keys(self, numbers: Index | Sequence[int]) -> list[str]:
        """The keys of the rows with these numbers. Raises Misuse for a row that does not exist."""

    def read(self, rows: Named, columns: Sequence[str] | None = None) -> BatchRef:
        """Return a reference to these columns of these rows, in this order; without `columns`, to all columns that
        every row has. If a value is replaced or cleared before the reference is read, reading it raises `Freed`.
        Raises Misuse for a row that does not exist or lacks a column, or if the rows have no column in common."""

    def schema(self) -> dict[str, Field]:
        """The field (kind, dtype and shape) of each column, by name."""

    def look(
        self,
        rows: Named | None = None,
        *,
        columns: Sequence[str] = (),
        tags: bool = True,
        since: int = 0,
        missing_ok: bool = False,
    ) -> TableSlice:
        """Return the keys and tags of these rows, and which of `columns` each row has. Without `rows`, of all rows in
        the order of arrival.

        tags: whether to return tags. since: the `changes` of an earlier look. If the table has not changed since then,
        no rows are returned. missing_ok: whether rows that do not exist are left out; otherwise they raise Misuse.
        """

    def ready(
        self,
        columns: Sequence[str],
        *,
        task: str | None = None,
        claim_id: str | None = None,
        least: int = 1,
        timeout: float = 0.0,
    ) -> Index:
        """Wait until at least `least` rows are ready. Returns the numbers of all ready rows in the order of arrival. A
        row is ready if it has all of `columns` and is not claimed by `task`.

        claim_id: if the task has a claim with this id, its rows are returned at once.
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
        """Mark these rows as claimed by the task, all or none. Returns the claim's rows, or None if a row was claimed
        meanwhile or does not exist. Then choose again.

        claim_id: a name for the claim. A call with the id of an earlier claim claims nothing, and returns the rows of
            that claim. So ranks that must see the same rows use the same id, and a call without an answer can be
            repeated.
        give: the rows that this claim returns; None: the claimed rows.
        """

    def find_claim(self, task: str, claim_id: str) -> Index | None:
        """The rows that the task's claim with this id returned; None if there is no such claim."""

    def release(self, task: str | None = None, numbers: Index | Sequence[int] | None = None) -> None:
        """Undo claims. The ids of claims that returned these rows can be used again.

        task: the task whose claims are undone; None: all tasks.
        numbers: the rows whose claims are undone; None: all rows.
        """

    def claimed(self, task: str, numbers: Index | Sequence[int] | None = None) -> Flags:
        """Return for each of these rows whether the task has claimed it; without `numbers`, for all rows in the order
        of arrival. Raises Misuse for a row that does not exist."""

    def clear(self, rows: Named) -> None:
        """Remove these rows with their columns, tags and numbers. Rows that do not exist are ignored."""

    def drop(self) -> None:
        """Remove the table with all rows and claims. A later write creates a new table of the same name."""

    def _put_row(
        self, key: str, row: SmallColumns, references: Mapping[str, BatchRef], tags: Any = None
    ) -> tuple[TableSlice, list[str]]:
        """Write a row as `upsert_and_look`, whose small columns are laid out already (`batch.small_columns`). Takes one
        message. references: by name, further columns that are in a table already, each of one row."""

class HistoryCalls(Blocking):
    """The calls of `History`."""

    def __repr__(self) -> str: ...
    def add(self, key: str, tokens: Any, *, epoch: int = 0, reward: float | None = None, timeout: float = 60.0) -> None:
        """Add a response to the prompt with this key. An empty response is ignored.

        tokens: the token ids, a flat sequence or a one-dimensional array. epoch: the epoch of training or the policy's
        version; higher is newer. reward: a number, or None. Drafts prefer responses with higher rewards. timeout:
        seconds to wait for room. Raises Misuse, SchemaMismatch, Backpressure, PeerUnavailable.
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
        """Add the response of each row of a reference. Tokens in a ragged column with the history's dtype are added
        without a copy, and stay even if the rows are freed. Other tokens are copied to the history's dtype.

        key, reward: the name of the column, or a value for each row. tokens: the column of token ids. epoch: as for
        `add`, for all rows or for each. timeout: seconds to wait for memory. Raises as `add`, and Freed or OwnerDied if
        the rows cannot be read.
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
        """Record the rows of a stream as its task `task`, until it is closed and has no more. Returns the number of
        recorded rows. Raises as `record` and `stream.deliveries`.

        A row's policy version is its epoch. tokens, key, reward: the columns with the token ids, the prompt's key and
        the reward. A row is recorded once it has them. key=None: a row's group is the key, and rows without a group are
        ignored. rows: the most rows of one delivery.
        """

    def following(
        self, *, task: str = "history", tokens: str = "response_ids", key: str | None = None, reward: str | None = None
    ) -> Following:
        """Return the argument `history` of `plane.stream` for other columns. Arguments as for `follow`."""

    def known(self, keys: Sequence[str]) -> list[list[StoredResponse]]:
        """Return for each of these prompts the metadata of its responses in its newest `keep` epochs, the oldest first.
        Reads no tokens."""

    def responses(self, key: str) -> list[Response]:
        """Return the responses to this prompt, the oldest epoch first. Tokens are int32, without a copy if that is the
        history's dtype. Responses that are lost or removed meanwhile are left out."""

    def drafter(self, key: str, *, max_tokens: int = 64) -> Drafter:
        """Return a drafter, which proposes the next tokens of a new response to this prompt, from its first token on.
        Without earlier responses, it proposes none. max_tokens: the most tokens of one draft.

        Raises PeerUnavailable, and Misuse if the extension for drafts was not built.
        """

    def lengths(self, keys: Sequence[str]) -> Lengths:
        """Predict the length in tokens of a response to each of these prompts, with its uncertainty. See
        `history.lengths`."""

    def schedule(
        self, keys: Sequence[str], workers: int, *, step: int = 0, samples: int = 1, slots: int | None = None
    ) -> Schedule:
        """Assign the responses to these prompts to workers, in an order, by predicted length. Arguments as for
        `history.scheduling.plan`."""

    def drop(self) -> None:
        """Remove all responses."""

class WeightsCalls(Blocking):
    """The calls of `Weights`."""

    def __repr__(self) -> str: ...
    def publish(self, version: int, tensors: Any, *, rank: int = 0, ranks: int = 1, timeout: float = 60.0) -> None:
        """Publish a version, or one rank's part of it. Readers see the version once all `ranks` have published. The
        tensors may be changed when the call returns.

        version: an integer higher than the newest complete version.
        tensors: a mapping of names to tensors, or an iterable (also an asynchronous one) of (name, tensor). A tensor is
            a `torch.Tensor` of any device, strides and dtype except sparse and quantized ones, an array, a `DTensor`,
            of which each rank publishes its local shard, or a `dataplane.weights.Slice`. Tensors that share memory are
            stored once. Of an iterable, about 256 MiB are in memory at a time.
        rank, ranks: the number of this publisher, from 0 on, and the number of publishers. A rank whose tensors are all
            empty, or all published by other ranks, publishes an empty part.
        timeout: seconds to wait for room.

        Raises Misuse (no tensor, a repeated name, a version that is not new), SchemaMismatch (a value that is no
        tensor), Backpressure, LimitExceeded, PeerUnavailable; OutcomeUnknown: publish again. If that raises Misuse
        because the version is complete, it was published. A publication that failed otherwise or was cancelled is
        invisible. Its data is removed at once, or with the next complete version.
        """

    def get(
        self,
        version: int | str | None = None,
        *,
        names: Sequence[str] | None = None,
        slices: Mapping[str, Selected] | None = None,
        timeout: float = 60.0,
    ) -> Tensors:
        """Map the tensors of a version. Returns a mapping of names to tensors, with the attribute `version`. All
        processes of a host map the same bytes. Each host fetches only the wanted bytes, once.

        version: a number, ">= N" for the newest complete version if it is N or higher, or None for the newest.
        names: the names of the wanted tensors; all if None.
        slices: the wanted parts of tensors, by name: for each dimension a slice of step 1, (start, stop) or None. Other
            tensors are mapped whole.
        timeout: seconds to wait for the version, and for room.

        Later versions do not change the mapping. Its memory is released when the mapping and all of its tensors are
        garbage-collected. Raises NotReady (no such version in time), Freed (the version is not kept any more), Misuse
        (a tensor, or a part of one, was not published), OwnerDied, Backpressure, PeerUnavailable.
        """

    def versions(self) -> list[int]:
        """The complete versions, the oldest first."""

    def newer(self, than: int | None = None, *, timeout: float = 60.0) -> int:
        """Wait until a complete version is newer than `than`; None: until there is any. Returns the newest version.
        timeout: seconds to wait. Raises NotReady at the deadline."""

    def watch(self, after: int | None = None, *, timeout: float | None = None) -> Iterator[int]:
        """Iterate over version numbers: the newest complete one, and each newer one as soon as it is complete. A caller
        that is slow gets only the newest of them.

        after: the version above which to begin; None: any.
        timeout: seconds to wait for each version; None: no limit. Raises NotReady at the deadline.
        """

    def drop(self) -> None:
        """Remove all versions. A process that has mapped one keeps it."""
