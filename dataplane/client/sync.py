"""The blocking interface: each call runs a coroutine of the asynchronous interface and waits for the result
(`client.loop_runner`).

Most methods are compiled from the asynchronous ones listed in `client.blocking_calls`. Methods that do more, or do not
wait, are written by hand.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from dataplane.batch.batch import Batch
from dataplane.batch.put_options import Narrow
from dataplane.batch.ref import BatchRef
from dataplane.client import appender, background, blocking, delivery, device_get, draft
from dataplane.client.appender import AsyncAppender
from dataplane.client.blocking import BlockingCall, Context, of_inner
from dataplane.client.blocking_calls import (
    AppenderCalls,
    DeliveryCalls,
    DraftCalls,
    HistoryCalls,
    PlaneCalls,
    RowCalls,
    StreamCalls,
    TableCalls,
    TakenCalls,
    WeightsCalls,
)
from dataplane.client.connecting import Connecting
from dataplane.client.histories import AsyncHistory, HistoryFollower
from dataplane.client.loop_runner import WITHIN, LoopRunner
from dataplane.client.plane import TIMEOUT_S, AsyncPlane
from dataplane.client.reader import with_columns
from dataplane.client.streams import AsyncStream
from dataplane.client.tables import AsyncTable
from dataplane.client.unfinished import AsyncRow
from dataplane.client.weights import AsyncWeights
from dataplane.config import NodeConfig
from dataplane.device.memory import device_of
from dataplane.device.ordering import called, streams
from dataplane.errors import Closed, DataplaneError, Freed, Misuse
from dataplane.stream.settings import StreamSettings

if TYPE_CHECKING:
    from dataplane.client.replay import Replay

log = logging.getLogger(__name__)

T = TypeVar("T")


class Delivery(DeliveryCalls, Context):
    """Leased rows of one task. `ref` and all lists are in the order of delivery."""

    _inner: delivery.Delivery
    ref: BatchRef = of_inner("ref", "A reference to the requested columns of the rows.")
    groups: list[str | int | None] = of_inner("groups", "The groups of the rows, None for a row without one.")
    versions: list[int] = of_inner("versions", "The policy versions that made the rows.")
    tags: dict[str, list[Any]] = of_inner("tags", "The tags of the rows: for each name, a list with a value a row.")
    keys: list[str] = of_inner("keys", "The keys of the rows.")
    settled: bool = of_inner("settled", "Whether the delivery was acked or given back.")


class Taken(TakenCalls, Context, Sequence[BatchRef]):
    """The rows of one step: a sequence with a reference for each rank. All ranks are settled by one ack or nack."""

    _inner: delivery.Taken

    @property
    def delivery(self) -> Delivery:
        """The delivery of all rows."""
        return Delivery(self._inner.delivery, self._wait, self._turns)


class Row(RowCalls, Context):
    """An unfinished row that this process holds. Made by `stream.begin` and `stream.resume`. As a context manager, the
    row is finished at the end of the block, and released if an exception leaves the block."""

    _inner: AsyncRow
    key: str = of_inner("key")
    group: str | int | None = of_inner("group")
    tags: dict[str, Any] = of_inner("tags")
    spans: list[tuple[int, int]] = of_inner(
        "spans", "The spans of tokens with the same policy version so far, each as `(version, number of tokens)`."
    )
    tokens: int = of_inner("tokens", "The number of tokens so far.")
    version: int = of_inner("version", "The policy version of the last piece, and the default for the next.")
    ended: bool = of_inner("ended", "Whether this object has finished or abandoned the row.")


class Sent:
    """Rows that were sent by an appender."""

    __slots__ = ("_inner", "_wait")

    def __init__(self, inner: appender.Sent, wait: BlockingCall) -> None:
        self._inner = inner
        self._wait = wait

    @property
    def done(self) -> bool:
        """Whether the append has succeeded or failed."""
        return self._inner.done

    def result(self) -> list[str]:
        """Wait until the rows are in the stream, and return their keys. Raises the append's error."""
        return self._inner.keys() if self._inner.done else self._wait(self._inner.wait())


class Appender(AppenderCalls, Context):
    """Gathers rows of this process into blocks and appends each block at once. The end of its `with` block closes it,
    and so appends all sent rows."""

    _inner: AsyncAppender

    def send(
        self,
        columns: Any,
        *,
        keys: Sequence[str] | None = None,
        group: Any = None,
        version: Any = 0,
        tags: Mapping[str, Any] | None = None,
    ) -> Sent:
        """Accept rows, with arguments as for `stream.append`. Returns an object whose `result()` returns their keys.
        Validates and copies the rows in this thread. Waits if too many blocks are pending. Raises SchemaMismatch,
        Misuse, Closed. The stream's error is raised by `result`, or else by the next `flush`."""
        while (sent := self._inner.offer(columns, keys, group, version, tags)) is None:
            self._wait(self._inner.room())
        return Sent(sent, self._wait)

    def append(
        self,
        columns: Any,
        *,
        keys: Sequence[str] | None = None,
        group: Any = None,
        version: Any = 0,
        tags: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Send rows and wait for their keys. Raises as `send`, and the stream's error. The values are read in this
        thread, after the work queued on its CUDA streams."""
        return self.send(columns, keys=keys, group=group, version=version, tags=tags).result()

    def close(self) -> None:
        """Accept no more rows, and `flush`. Idempotent."""
        self._wait(self._inner.aclose())


_planes: dict[str, Plane] = {}
"""The planes of unpickled streams and tables, by the address of the node."""

_opening = threading.Lock()
os.register_at_fork(after_in_child=_opening._at_fork_reinit)  # type: ignore[attr-defined]  # it may have been held


def _plane_at(address: str) -> Plane:
    with _opening:
        with suppress(KeyError, DataplaneError):  # none, or it was closed, is the parent's, or its node has ended
            _planes[address]._inner.check()
            return _planes[address]
        _planes[address] = connect(address)
        return _planes[address]


def opened(address: str, kind: str, name: str) -> Any:
    """The unpickled stream or table with this name. All unpickled objects of one node share a plane, and keep it
    open."""
    plane = _plane_at(address)
    found = getattr(plane, kind)(name)
    found._plane = plane
    return found


class Stream(StreamCalls):
    """A stream of the node of this plane. Created by `plane.stream`; any number of processes may use it at once."""

    _inner: AsyncStream
    _plane: Any = None
    name: str = of_inner("name", "The name of the stream.")
    settings: StreamSettings = of_inner("settings", "The tasks and limits of the stream.")
    follower: HistoryFollower | None = of_inner(
        "follower", "The recorder of the stream's rows in a history, if `plane.stream` was given one; else None."
    )
    replay: Replay | None = of_inner("replay", "The replay that fills the stream, if `plane.replay` made it.")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the stream as its node and name. All unpickled streams and tables of a node share a plane."""
        return opened, (self._inner._connection.address, "stream", self.name)

    def appender(
        self, *, max_rows: int = 256, max_delay: float = 0.005, timeout: float | None = None, narrow: Narrow = False
    ) -> Appender:
        how: dict[str, Any] = {"max_rows": max_rows, "max_delay": max_delay, "timeout": timeout, "narrow": narrow}
        inner = AsyncAppender(self._inner, self._turns.begin, self._turns.soon, **how)
        return Appender(inner, self._wait, self._turns)


class Draft(DraftCalls):
    """Unsealed columns. `draft[name]` is a writable NumPy array; for a ragged column, a list with an array for each
    row. The end of a `with` block drops an unsealed draft."""

    _inner: draft.Draft

    def drop(self) -> None:
        """Release the memory of an unsealed draft. Idempotent. Does nothing in a forked child, because the memory is
        the parent's."""
        if not self._inner.in_child:
            self._turns.soon(self._inner.drop)

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()


class Plane(PlaneCalls):
    """This process's handle to the system, from `dataplane.connect`. Any thread may use it.

    Each method runs the method of `AsyncPlane` with the same name, and waits for its result.
    """

    _inner: AsyncPlane

    def __init__(self, plane: AsyncPlane, turns: LoopRunner) -> None:
        self._inner = plane
        self._turns = turns
        self._open = True
        _unclosed.add(self)
        weakref.finalize(self, _abandon, plane, turns).atexit = False

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:  # type: ignore[override]  # others have this one
        try:
            self._inner.check()  # checked first, because a forked child or a closed plane has no event loop
        except BaseException:
            coroutine.close()
            raise
        if not streams():
            return self._turns.wait(coroutine)
        with called():
            return self._turns.wait(coroutine)

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickled, it is another plane on the same node."""
        return connect, (self.address,)

    def get(
        self,
        ref: BatchRef,
        *,
        timeout: float = TIMEOUT_S,
        device: Any = None,
        out: Mapping[str, Any] | None = None,
        group: Any = None,
    ) -> Batch:
        device = None if device is None else device_of(device)  # by this thread's current device
        alone = group is None and self._turns.free and not self._inner.traced
        asked = self._inner.getting(ref, timeout) if alone else None
        if asked is not None:
            try:
                batch = self._turns.ask(asked)
            except Freed as error:
                raise with_columns(error, ref) from error
        elif group is None:
            batch = self._wait(self._inner.read(ref, timeout))
        else:  # a collective of all ranks, run in this thread
            from dataplane import collective  # seldom needed

            batch = collective.get(ref, group, plane=self, device=device, timeout=timeout)
            device = None
        return batch if device is None and out is None else device_get.placed(batch, device, out, self._inner.pool)

    def close(self) -> None:
        """Close the plane. Idempotent. Views stay valid. A node that this plane started ends once no process uses it.
        Raises Misuse in a finalizer or a signal handler that runs within a call of the plane."""
        if self._open and not self._inner.connection.in_child:
            if self._turns.within:
                raise Misuse(WITHIN)
            self._open = False
            try:
                self._turns.wait(self._inner.aclose())
            finally:  # also if interrupted
                self._turns.close()

    def __enter__(self) -> Plane:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Table(TableCalls):
    """A table of the cluster. Created by `plane.table` without a message. Any number of processes may use it.

    In a cluster of several hosts, a table survives the death of any one of them. Columns that were stored on that host
    alone raise `OwnerDied` when they are read, until they are written again. If all hosts that have the table die
    together, its methods raise `OwnerDied`, and `plane.table` returns a new one. A durable table is recovered when its
    nodes are restarted on their data directories.

    Rows are named by a list of keys, or by an array of row numbers. Numbers increase in the order of arrival, and are
    not reused in the table.
    """

    _inner: AsyncTable
    _plane: Any = None
    name: str = of_inner("name", "The name of the table.")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the table as its node and name, as a stream."""
        return opened, (self._inner._connection.address, "table", self.name)


class History(HistoryCalls):
    """The responses of earlier epochs, by prompt. Made by `plane.history`. Any number of processes may use it."""

    _inner: AsyncHistory
    name: str = of_inner("name", "The name of the history.")


class Weights(WeightsCalls):
    """Versions of a model's tensors. Made by `plane.weights`. Any number of processes may publish and read."""

    _inner: AsyncWeights
    name: str = of_inner("name", "The name of the weights.")
    keep: int = of_inner("keep", "The number of versions that are kept.")


blocking.CLASSES.update(
    {
        draft.Draft: Draft,
        delivery.Delivery: Delivery,
        delivery.Taken: Taken,
        AsyncRow: Row,
        AsyncStream: Stream,
        AsyncTable: Table,
        AsyncHistory: History,
        AsyncWeights: Weights,
    }
)


def connect(
    address: str | None = None,
    *,
    config: NodeConfig | None = None,
    gpu_budget: int | str | None = None,
    name: str | None = None,
) -> Plane:
    """Connect to the node at `address` or at $DATAPLANE_ADDRESS, else to a node that is started for this process and
    its children. Returns the plane.

    address: `unix:///path.sock`, or `ray` for the node of this Ray node (`dataplane.integrations.ray`).
    config: the settings of a node that is started. Without an address, a process that gives them starts a new node,
        even if it started one before. A node that another process started keeps its settings.
    gpu_budget: bytes, or text like "8GiB", that `put(device="keep")` may keep in memory of devices; 1 GiB if None.
    name: the name of this process in `stats`, `dataplane top` and errors, up to 80 characters. None: the program's
        name, followed by the process name in a child of `multiprocessing`.

    Raises PeerUnavailable, Unauthenticated, ProtocolMismatch, Rejected (the host cannot meet the settings);
    ValueError for an invalid address.
    """
    turns = LoopRunner()

    async def attach() -> AsyncPlane:
        return await Connecting(address, config, soon=turns.soon, gpu_budget=gpu_budget, name=name)

    try:
        plane = turns.wait(attach())
        turns.busy = plane.busy
        return Plane(plane, turns)
    except BaseException:
        turns.close()
        raise


def _abandon(plane: AsyncPlane, turns: LoopRunner) -> None:
    """Close a plane that nothing refers to any more, without waiting. A plane that has started a node or background
    work stays open, because both would end with it."""
    if not (plane.connection.in_child or plane._node or background.is_running(plane.connection)):
        with suppress(Closed):
            turns.begin(plane.aclose())
        turns.end()


_unclosed: weakref.WeakSet[Plane] = weakref.WeakSet()


def _close_all() -> None:
    """At the end of the process, close planes that keep columns on devices, so that the columns are copied to the
    arena. The copies need threads, which the interpreter ends before it runs `atexit`. So this is registered where
    `concurrent.futures` registers, and is called before it, because the last registered is called first."""
    for plane in list(_unclosed):
        try:
            if plane._inner._kept_columns.live:
                plane.close()
        except DataplaneError as error:
            log.warning("columns that a plane keeps on its device are lost: closing the plane failed: %s", error)


threading._register_atexit(_close_all)  # type: ignore[attr-defined]
