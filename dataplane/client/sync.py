"""The synchronous face: each call hands the asynchronous one's coroutine to a loop in a thread, and waits for it.

It adds no logic. What always holds: a call that is interrupted (Ctrl-C) cancels what it waited for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Coroutine, Iterator, Mapping
from typing import Any, TypeVar

from dataplane.batch.batch import Batch
from dataplane.batch.ref import BatchRef
from dataplane.client.draft import Draft as AsyncDraft
from dataplane.client.draft import Spec
from dataplane.client.plane import TIMEOUT_S, AsyncPlane
from dataplane.client.plane import connect as connect_async
from dataplane.config import NodeConfig
from dataplane.observe.stats import Stats

T = TypeVar("T")


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dataplane", daemon=True)
        self._thread.start()

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it there; its result or its error."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Draft:
    """See `dataplane.client.draft.Draft`; here `seal` waits. As a context manager it drops what was not sealed."""

    def __init__(self, draft: AsyncDraft, loop: _Loop) -> None:
        self._draft = draft
        self._loop = loop

    def __getitem__(self, name: str) -> Any:
        """The column's memory, to be written: an array, or for a ragged column a list of one a row."""
        return self._draft[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._draft)

    def torch(self, name: str) -> Any:
        """As `draft[name]`, as torch tensors."""
        return self._draft.torch(name)

    def seal(self) -> BatchRef:
        """Make what was written visible, and unchangeable from now on. Raises LeaseExpired, Closed, PeerUnavailable."""
        return self._loop.wait(self._draft.seal())

    def drop(self) -> None:
        """Give the memory back unsealed. Idempotent."""

        async def drop() -> None:
            self._draft.drop()

        self._loop.wait(drop())

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        self.drop()


class Plane:
    """This process's handle to the system. Made by `dataplane.connect`; any thread may use it.

    Each method is that of `AsyncPlane`, waited for.
    """

    def __init__(self, plane: AsyncPlane, loop: _Loop) -> None:
        self._plane = plane
        self._loop = loop
        self._open = True

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            self._plane.check()  # before the loop is touched, which a forked child or a closed plane lacks
        except BaseException:
            coroutine.close()
            raise
        return self._loop.wait(coroutine)

    @property
    def address(self) -> str:
        """What other processes of this host connect to."""
        return self._plane.address

    def put(
        self, columns: Any, *, scope: str | None = None, dedupe: Collection[str] = (), timeout: float = TIMEOUT_S
    ) -> BatchRef:
        """Store columns of equal row count, and return a reference to them. See `AsyncPlane.put`."""
        return self._wait(self._plane.put(columns, scope=scope, dedupe=dedupe, timeout=timeout))

    def draft(self, columns: Mapping[str, Spec], *, scope: str | None = None, timeout: float = TIMEOUT_S) -> Draft:
        """Room for columns that the caller writes in place, and then seals. See `AsyncPlane.draft`."""
        return Draft(self._wait(self._plane.draft(columns, scope=scope, timeout=timeout)), self._loop)

    def get(self, ref: BatchRef, *, timeout: float = TIMEOUT_S) -> Batch:
        """The rows and columns that the reference means, in place. See `AsyncPlane.get`."""
        return self._wait(self._plane.get(ref, timeout=timeout))

    def free(self, ref: BatchRef | None = None, *, scope: str | None = None) -> None:
        """Free what a reference means, or everything put under a scope. See `AsyncPlane.free`."""
        self._wait(self._plane.free(ref, scope=scope))

    def stats(self) -> Stats:
        """The node's figures now."""
        return self._wait(self._plane.stats())

    def close(self) -> None:
        """Close the plane. Idempotent. Views stay valid; a node that this plane started ends once nobody uses it."""
        if self._open and not self._plane.in_child:
            self._open = False
            self._loop.wait(self._plane.aclose())
            self._loop.stop()

    def __enter__(self) -> Plane:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(address: str | None = None, *, config: NodeConfig | None = None) -> Plane:
    """Attach to the node at `address`, at $DATAPLANE_ADDRESS, or at one started for this process and its children.

    config: the settings of a node that is started. Without an address, a process that gives them gets a node of its
        own, even if it started another before; a node that others started keeps its own settings.

    Raises PeerUnavailable, Unauthenticated, ProtocolMismatch; ValueError for what is no address.
    """
    loop = _Loop()

    async def attach() -> AsyncPlane:
        return await connect_async(address, config=config)

    try:
        return Plane(loop.wait(attach()), loop)
    except BaseException:
        loop.stop()
        raise
