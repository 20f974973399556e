"""The synchronous interface: each call runs the coroutine of the asynchronous one and waits for it
(`client.loop_runner`).

Most methods are compiled: `client.blocking_calls` names them. Written by hand are those that
do more than that, or do not wait.
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
from dataplane.client import appender, blocking, delivery, device_get, draft
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
from dataplane.errors import DataplaneError, Freed, Misuse
from dataplane.stream.settings import StreamSettings

if TYPE_CHECKING:
    from dataplane.client.replay import Replay

log = logging.getLogger(__name__)

T = TypeVar("T")


class Delivery(DeliveryCalls, Context):
    """Leased rows of one task. `ref` and all lists have the rows in the order of delivery."""

    _inner: delivery.Delivery
    ref: BatchRef = of_inner("ref", "The rows, of the columns that were asked for.")
    groups: list[str | int | None] = of_inner("groups", "The groups of the rows, None for a row without one.")
    versions: list[int] = of_inner("versions", "The policy versions that wrote the rows.")
    tags: dict[str, list[Any]] = of_inner("tags", "The tags of the rows: for each name a list with a value a row.")
    keys: list[str] = of_inner("keys", "The keys of the rows.")
    settled: bool = of_inner("settled", "Whether it was acked or given back.")


class Taken(TakenCalls, Context, Sequence[BatchRef]):
    """The rows of one step, a reference for each rank. One delivery, settled as a whole."""

    _inner: delivery.Taken

    @property
    def delivery(self) -> Delivery:
        """The delivery of all rows."""
        return Delivery(self._inner.delivery, self._wait, self._turns)


class Row(RowCalls, Context):
    """An unfinished row that this process holds. Made by `stream.begin` and `stream.resume`. As a context manager it
    is finished when the block is left, and released for others when it is left by an exception."""

    _inner: AsyncRow
    key: str = of_inner("key")
    group: str | int | None = of_inner("group")
    tags: dict[str, Any] = of_inner("tags")
    spans: list[tuple[int, int]] = of_inner(
        "spans", "The policy versions of its tokens so far, in order, each as `(version, tokens)`."
    )
    tokens: int = of_inner("tokens", "The number of its tokens so far.")
    version: int = of_inner("version", "The policy version of the last piece.")
    ended: bool = of_inner("ended", "Whether it was finished or abandoned here.")


class Sent:
    """Rows that were sent."""

    __slots__ = ("_inner", "_wait")

    def __init__(self, inner: appender.Sent, wait: BlockingCall) -> None:
        self._inner = inner
        self._wait = wait

    @property
    def done(self) -> bool:
        """Whether the result is known: keys or an error."""
        return self._inner.done

    def result(self) -> list[str]:
        """Wait until the rows are in the stream, and return their keys. Raises the error if they were not appended."""
        return self._inner.keys() if self._inner.done else self._wait(self._inner.wait())


class Appender(AppenderCalls, Context):
    """Gathers rows of this process into blocks, each appended as one. As a context manager it is closed at the end of
    the block."""

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
        """Accept rows, with arguments as for `stream.append`. `result()` of the returned object gives their keys. Does
        not enter the event loop: a row costs its validation and its copy. Waits if too many blocks wait. Raises
        SchemaMismatch, Misuse, Closed; an error of the stream is raised by `result`, or else by the next `flush`."""
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
        """As `send`, and wait for the keys. The values are read in this thread, after the work queued on its CUDA
        streams."""
        return self.send(columns, keys=keys, group=group, version=version, tags=tags).result()

    def close(self) -> None:
        """Accept no more rows, and `flush`. Idempotent."""
        self._wait(self._inner.aclose())


_planes: dict[str, Plane] = {}
"""The planes of the streams and tables that this process has unpickled, by the address of the node."""

_opening = threading.Lock()
os.register_at_fork(after_in_child=_opening._at_fork_reinit)  # type: ignore[attr-defined]  # it may have been held


def _plane_at(address: str) -> Plane:
    with _opening:
        with suppress(KeyError, DataplaneError):  # it was closed, is the parent's, or the node has gone
            _planes[address]._inner.check()
            return _planes[address]
        _planes[address] = connect(address)
        return _planes[address]


def opened(address: str, kind: str, name: str) -> Any:
    """An unpickled stream or table. All of this process from one node share a plane, which they keep open."""
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
        "follower", "The recorder of its rows in the history that `plane.stream` was given."
    )
    replay: Replay | None = of_inner("replay", "The replay that fills the stream, if `plane.replay` created it.")

    def __reduce__(self) -> tuple[Any, ...]:
        """Unpickled, it is the stream of this name on the same node. All unpickled streams and tables of a process
        share a plane."""
        return opened, (self._inner._connection.address, "stream", self.name)

    def appender(
        self, *, max_rows: int = 256, max_delay: float = 0.005, timeout: float | None = None, narrow: Narrow = False
    ) -> Appender:
        how: dict[str, Any] = {"max_rows": max_rows, "max_delay": max_delay, "timeout": timeout, "narrow": narrow}
        inner = AsyncAppender(self._inner, self._turns.begin, self._turns.soon, **how)
        return Appender(inner, self._wait, self._turns)


class Draft(DraftCalls):
    """Unsealed columns. `draft[name]` is a writable NumPy array, or for a ragged column a list of one for each row. As
    a context manager, it drops an unsealed draft at the end."""

    _inner: draft.Draft

    def drop(self) -> None:
        """Release the memory unsealed. Idempotent. In a forked child it does nothing: the memory is the parent's."""
        if not self._inner.in_child:
            self._turns.soon(self._inner.drop)

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()


class Plane(PlaneCalls):
    """This process's handle to the system, from `dataplane.connect`; any thread may use it.

    Each method runs the method of `AsyncPlane` and waits for its result.
    """

    _inner: AsyncPlane

    def __init__(self, plane: AsyncPlane, turns: LoopRunner) -> None:
        self._inner = plane
        self._turns = turns
        self._open = True
        _unclosed.add(self)

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:  # type: ignore[override]  # others have this one
        try:
            self._inner.check()  # before the loop is touched, which a forked child or a closed plane lacks
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
        else:  # in this thread, which nothing else needs meanwhile
            from dataplane import collective  # seldom needed

            batch = collective.get(ref, group, plane=self, device=device, timeout=timeout)
            device = None
        return batch if device is None and out is None else device_get.placed(batch, device, out, self._inner.pool)

    def close(self) -> None:
        """Close the plane. Idempotent. Views stay valid; a node that this plane started ends once no process uses
        it. Raises Misuse in a finalizer or a signal's handler that runs within a call of the plane."""
        if self._open and not self._inner.connection.in_child:
            if self._turns.within:
                raise Misuse(WITHIN)
            self._open = False
            try:
                self._turns.wait(self._inner.aclose())
            finally:  # interrupted too
                self._turns.close()

    def __enter__(self) -> Plane:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Table(TableCalls):
    """A table of the cluster. Created by `plane.table` without a message; any number of processes may use it.

    Over several hosts it survives the death of any one of them: columns that were stored on that host alone raise
    `OwnerDied` when they are read, until they are written again. If all hosts that have the table die together, its
    methods raise `OwnerDied`, and `plane.table` returns a new one. A durable table is recovered when its nodes are
    restarted on their data directories.

    Rows are named by key or by number: an array of integers in the order of arrival, which are never reused in the
    table.
    """

    _inner: AsyncTable
    _plane: Any = None
    name: str = of_inner("name", "The name of the table.")

    def __reduce__(self) -> tuple[Any, ...]:
        """As of `Stream`."""
        return opened, (self._inner._connection.address, "table", self.name)


class History(HistoryCalls):
    """The responses of earlier epochs, by prompt. Made by `plane.history`; any number of processes may use it."""

    _inner: AsyncHistory
    name: str = of_inner("name", "The name of the history.")


class Weights(WeightsCalls):
    """Versions of a model's tensors. Made by `plane.weights`; any number of processes may use it."""

    _inner: AsyncWeights
    name: str = of_inner("name", "The name of the weights.")
    keep: int = of_inner("keep", "How many versions are kept.")


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
    """Attach to the node at `address`, at $DATAPLANE_ADDRESS, or at one started for this process and its children.

    address: `unix:///path.sock`, or `ray` for the node that `dataplane.integrations.ray` has on this Ray node.
    config: the settings of a node that is started. Without an address, a process that gives them gets a node of its
        own, even if it started another before; a node that others started keeps its own settings.
    gpu_budget: bytes, or text like "8GiB", that `put(device="keep")` may keep in memory of devices; 1 GiB if None.
    name: the name of this process in `stats`, `dataplane top` and errors, up to 80 characters; None: its program's
        name, followed by its process name if it is a child of `multiprocessing`.

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


_unclosed: weakref.WeakSet[Plane] = weakref.WeakSet()


def _close_all() -> None:
    """At the end of the process, close planes that keep columns, so that they are copied to the arena. The copies need
    threads, and the interpreter ends those before it runs `atexit`; so this is registered where `concurrent.futures`
    registers. The last registered is called first."""
    for plane in list(_unclosed):
        try:
            if plane._inner._kept_columns.live:
                plane.close()
        except DataplaneError as error:
            log.warning("columns that a plane keeps on its device are lost: closing the plane failed: %s", error)


threading._register_atexit(_close_all)  # type: ignore[attr-defined]
