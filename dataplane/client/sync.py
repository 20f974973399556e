"""The synchronous interface: each call runs the coroutine of the asynchronous one and waits for it
(`client.loop_runner`).

It adds no logic.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from dataplane.batch.batch import Batch
from dataplane.batch.put_options import Narrow, Objects
from dataplane.batch.ref import BatchRef
from dataplane.batch.small_columns import SmallColumns
from dataplane.client import histories, spans, weights
from dataplane.client.connecting import Connecting
from dataplane.client.draft import Draft as AsyncDraft
from dataplane.client.draft import Spec
from dataplane.client.exit_hook import close_at_end
from dataplane.client.loop_runner import LoopRunner
from dataplane.client.plane import TIMEOUT_S, AsyncPlane
from dataplane.client.reader import with_columns
from dataplane.client.sync_histories import History
from dataplane.client.sync_streams import Stream
from dataplane.client.sync_tables import Table
from dataplane.client.sync_weights import Weights
from dataplane.config import NodeConfig
from dataplane.device.naming import device_of
from dataplane.device.ordering import called, streams
from dataplane.diagnosis.causes import Diagnosis
from dataplane.errors import Freed
from dataplane.observe.stats import Stats

T = TypeVar("T")


class Draft:
    """See `dataplane.client.draft.Draft`; here `seal` waits. As a context manager it drops what was not sealed at
    its end."""

    def __init__(self, draft: AsyncDraft, turns: LoopRunner) -> None:
        self._draft = draft
        self._turns = turns

    def __getitem__(self, name: str) -> Any:
        """The memory of the column: an array, or for a ragged column a list with one array a row."""
        return self._draft[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._draft)

    def torch(self, name: str) -> Any:
        """As `draft[name]`, as torch tensors."""
        return self._draft.torch(name)

    def seal(self) -> BatchRef:
        """Make the columns visible, and immutable. Raises LeaseExpired, Closed, PeerUnavailable."""
        self._draft.check()  # before the loop is touched, which a forked child or a closed plane lacks
        return self._turns.wait(self._draft.seal())

    def drop(self) -> None:
        """Release the memory unsealed. Idempotent. In a forked child it does nothing: the memory is the parent's."""
        if not self._draft.in_child:
            self._turns.soon(self._draft.drop)

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()


class Plane:
    """This process's handle to the system, from `dataplane.connect`; any thread may use it.

    Each method waits for that of `AsyncPlane`.
    """

    def __init__(self, plane: AsyncPlane, turns: LoopRunner) -> None:
        self._plane = plane
        self._turns = turns
        self._open = True

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            self._plane.check()  # before the loop is touched, which a forked child or a closed plane lacks
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

    @property
    def address(self) -> str:
        """The address for other processes of this host."""
        return self._plane.address

    def put(
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
        """Store columns of equal row count. Returns a reference to them. See `AsyncPlane.put`."""
        if device is not None:
            close_at_end(self)
        one = self._turns.free and not narrow and objects == "store"
        asked = self._plane.putting(columns, scope, dedupe, replicas, timeout, device) if one else None
        if asked is not None:
            return self._turns.ask(asked)
        how: dict[str, Any] = {"scope": scope, "dedupe": dedupe, "replicas": replicas, "timeout": timeout}
        return self._wait(self._plane.put(columns, **how, device=device, narrow=narrow, objects=objects))

    def draft(self, columns: Mapping[str, Spec], *, scope: str | None = None, timeout: float = TIMEOUT_S) -> Draft:
        """Memory for columns that the caller writes in place, and then seals. See `AsyncPlane.draft`."""
        return Draft(self._wait(self._plane.draft(columns, scope=scope, timeout=timeout)), self._turns)

    def get(
        self,
        ref: BatchRef,
        *,
        timeout: float = TIMEOUT_S,
        device: Any = None,
        out: Mapping[str, Any] | None = None,
        group: Any = None,
    ) -> Batch:
        """The rows and columns of the reference, in place. See `AsyncPlane.get`."""
        device = None if device is None else device_of(device)  # by this thread's current device
        alone = group is None and device is None and self._turns.free
        asked = self._plane.getting(ref, timeout) if alone else None
        if asked is not None:
            try:
                batch = self._turns.ask(asked)
            except Freed as error:
                raise with_columns(error, ref) from error
        elif group is None:
            batch = self._wait(self._plane.read(ref, timeout, device))
        else:  # in this thread, which nothing else needs meanwhile
            from dataplane import collective  # seldom needed

            batch = collective.get(ref, group, plane=self, device=device, timeout=timeout)
            device = None
        return self._plane.placed(batch, device, out)

    def prefetch(self, ref: BatchRef, *, timeout: float = TIMEOUT_S) -> None:
        """Begin to read the rows of the reference, and return at once. See `AsyncPlane.prefetch`."""
        self._wait(self._plane.prefetch(ref, timeout=timeout))

    def free(self, ref: BatchRef | None = None, *, scope: str | None = None) -> None:
        """Free the rows of a reference, or everything put under a scope. See `AsyncPlane.free`."""
        self._wait(self._plane.free(ref, scope=scope))

    def retain(self, ref: BatchRef) -> BatchRef:
        """Another reference to the same stored rows, which stay until both were freed. See `AsyncPlane.retain`."""
        return self._wait(self._plane.retain(ref))

    def _put_row(self, row: SmallColumns, timeout: float) -> tuple[bytes, int]:
        """Store a row that `batch.small_columns` laid out. See `AsyncPlane._put_row`."""
        return self._turns.ask(self._plane.putting_row(row, timeout))

    def _put_rows(self, rows: Sequence[SmallColumns], timeout: float) -> tuple[bytes, list[int]]:
        """As `_put_row`, of several. See `AsyncPlane._put_rows`."""
        return self._wait(self._plane._put_rows(rows, timeout))

    def _retain_rows(self, node: bytes, rows: Sequence[tuple[int, int, int]]) -> list[int]:
        """A link to each of these rows. See `AsyncPlane._retain_rows`."""
        return self._wait(self._plane._retain_rows(node, rows))

    def retain_each(self, refs: Sequence[BatchRef]) -> list[BatchRef]:
        """As `retain`, of several references, each with an owner of its own. See `AsyncPlane.retain_each`."""
        return self._wait(self._plane.retain_each(refs))

    def stats(self, node: str | None = None) -> Stats:
        """The statistics of this host's node, or of another member. See `AsyncPlane.stats`."""
        return self._wait(self._plane.stats(node))

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
        """The stream of this name, created if it does not exist. See `AsyncPlane.stream`."""
        opened = self._plane.stream(
            name,
            tasks,
            max_bytes=max_bytes,
            max_rows=max_rows,
            max_lag=max_lag,
            max_deliveries=max_deliveries,
            replicas=replicas,
            group_size=group_size,
            durable=durable,
            history=history,
        )
        return Stream(self._wait(opened), self._wait, self._turns)

    def restore(self, path: str | os.PathLike[str], *, name: str | None = None, timeout: float = TIMEOUT_S) -> Stream:
        """The stream that `stream.checkpoint` wrote to the file. See `AsyncPlane.restore`."""
        return Stream(self._wait(self._plane.restore(path, name=name, timeout=timeout)), self._wait, self._turns)

    def replay(
        self,
        directory: str | os.PathLike[str],
        name: str | None = None,
        tasks: Sequence[str] | None = None,
        **how: Any,
    ) -> Stream:
        """A stream of a recording, which a thread of its own fills and closes. See `AsyncPlane.replay`."""
        return Stream(self._wait(self._plane.replay(directory, name, tasks, **how)), self._wait, self._turns)

    def streams(self, node: str | None = None) -> dict[str, Any]:
        """The statistics of all streams of the node, or of another member, by name. See `AsyncPlane.streams`."""
        return self._wait(self._plane.streams(node))

    def table(self, name: str, *, durable: bool | None = None) -> Table:
        """The table of this name, created by the first write to it. See `AsyncPlane.table`."""
        return Table(self._plane.table(name, durable=durable), self._wait)

    def history(
        self,
        name: str,
        keep: int = histories.KEEP,
        max_bytes: int | str = histories.MAX_BYTES,
        *,
        samples: int = histories.SAMPLES,
        dtype: str = "int32",
        durable: bool | None = None,
    ) -> History:
        """The history of this name: responses of earlier epochs by prompt. See `AsyncPlane.history`."""
        inner = self._plane.history(name, keep, max_bytes, samples=samples, dtype=dtype, durable=durable)
        return History(inner, self._wait)

    def weights(self, name: str, keep: int = weights.KEEP, *, replicas: int = 1) -> Weights:
        """The weights of this name, of which `keep` versions are kept. See `AsyncPlane.weights`."""
        return Weights(self._plane.weights(name, keep, replicas=replicas), self._wait)

    def tables(self) -> dict[str, Any]:
        """The statistics of all tables, by name. See `AsyncPlane.tables`."""
        return self._wait(self._plane.tables())

    def members(self) -> dict[str, Any]:
        """The members of the node's cluster. See `AsyncPlane.members`."""
        return self._wait(self._plane.members())

    def graphs(self) -> dict[str, Any]:
        """The performance reports of processes. See `AsyncPlane.graphs`."""
        return self._wait(self._plane.graphs())

    def diagnose(self, seconds: float = 10.0, *, role: str | None = None) -> Diagnosis:
        """Why a step of the job takes as long as it does. See `AsyncPlane.diagnose`."""
        return self._wait(self._plane.diagnose(seconds, role=role))

    def close(self) -> None:
        """Close the plane. Idempotent. Views stay valid; a node that this plane started ends once nobody uses it."""
        if self._open and not self._plane.in_child:
            self._open = False
            try:
                self._turns.wait(self._plane.aclose())
            finally:  # interrupted too
                self._turns.close()

    def __enter__(self) -> Plane:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
        name, and its name as a child of that.

    Raises PeerUnavailable, Unauthenticated, ProtocolMismatch, Rejected (the host cannot meet the settings);
    ValueError for an invalid address.
    """
    turns = LoopRunner()

    async def attach() -> AsyncPlane:
        return await Connecting(address, config, soon=turns.soon, gpu_budget=gpu_budget, name=name)

    try:
        plane = turns.wait(attach())
        turns.busy = plane.busy
        if spans.enabled():
            from dataplane.client.traced import TracedPlane  # above this

            return TracedPlane(plane, turns)
        return Plane(plane, turns)
    except BaseException:
        turns.close()
        raise
