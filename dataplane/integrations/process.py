"""The plane of this process, which all integrations share. `Watch` frees stored values whose last user in this process
is gone.

Invariants: a process has one plane, which is connected at its first use. A forked child makes a connection of its own.
A process connects again, to the current node, if its node has ended or its Ray job has changed. Integrations do not
close the plane: it is closed when the process ends.

A child uses its parent's node, whether it was forked or spawned, if the parent had connected before. If that is a node
of the Ray job, the parent sets its address in the environment: a forked child must not call Ray, since it lacks Ray's
threads, and a spawned child has no connection to Ray.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from dataplane.batch.ref import BatchRef
from dataplane.client.sync import Plane, connect
from dataplane.config import NodeConfig, check_host, environment
from dataplane.errors import Closed, DataplaneError, Misuse, OutcomeUnknown, PeerUnavailable

T = TypeVar("T")

_NO_NODE = (
    "no node is known to this process: call dataplane.integrations.ray.up() in the driver of a Ray job, or start one"
    " (`dataplane node`) and put its address into DATAPLANE_ADDRESS"
)

_FORKED = (
    "this process was forked from one that uses Ray, and can not ask Ray for its node: connect the parent before it"
    " forks (tq.init(), or dataplane.integrations.process.plane()), or start the child with the method 'spawn' and"
    " ray.init() in it"
)
_INHERITED = "DATAPLANE_PARENT_ADDRESS"
"""The environment variable with the address of the node that the parent uses. It is set only if that node belongs to
the parent's Ray job."""

_lock = threading.Lock()
_plane: Plane | None = None
_pid = 0
_by_ray: tuple[Any, Any] | None = None
"""The Ray job of the node. None: no Ray job."""

_before_fork: tuple[Any, Any] | None = None
"""In a forked child, the Ray job of the parent."""


def plane() -> Plane:
    """The plane of this process, connected at the first call: to the node of `$DATAPLANE_ADDRESS`, or else that of the
    Ray job.

    Raises Misuse if there is neither, PeerUnavailable if the node does not answer.
    """
    return _connected(start=False, config=None)


def start(config: NodeConfig | None = None) -> Plane:
    """As `plane`; if no node is known, one is started for this process and its children, with these settings.

    Raises as `plane`, and Rejected if the settings cannot be met.
    """
    return _connected(start=True, config=config)


def with_plane(work: Callable[[Plane], T]) -> T:
    """The result of `work` with this process's plane. If the node of the plane has ended and another one runs, `work`
    is repeated there, so it must be safe to repeat."""
    first = plane()
    try:
        return work(first)
    except (PeerUnavailable, OutcomeUnknown, Closed):
        again = plane()
        if again is first:
            raise
        return work(again)


def close() -> None:
    """Close the plane; the next use connects again. Idempotent."""
    global _plane
    with _lock:
        plane, _plane = _plane, None
        if _own_address() is not None:
            os.environ.pop(_INHERITED)
        if plane is not None and _pid == os.getpid():
            plane.close()


def is_connected() -> bool:
    """Whether this process has a plane."""
    return _plane is not None and _pid == os.getpid()


def notice_end() -> None:
    """Ask the node of this process's plane whether it runs. If it has ended, the next use connects again."""
    plane = _plane if is_connected() else None
    if plane is not None:
        with suppress(DataplaneError):
            plane.stats()


def would_start() -> bool:
    """Whether `start` would start a node. Raises Misuse as `start`."""
    return not is_connected() and _address(start=True) is None


def ray_job() -> tuple[Any, Any] | None:
    """The Ray cluster and job of this process; None if Ray is not initialised here, or only in the process that this
    one was forked from."""
    ray: Any = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return None
    found: tuple[Any, Any] = ray.get_runtime_context().worker.current_cluster_and_job
    return None if found == _before_fork else found


def by_ray() -> tuple[Any, Any] | None:
    """The Ray job of the node of this process's plane, as `ray_job` names it; None if it has none."""
    return _by_ray if is_connected() else None


def _connected(*, start: bool, config: NodeConfig | None) -> Plane:
    global _plane, _pid, _by_ray
    with _lock:
        if _plane is not None and _pid == os.getpid() and has_ended(_plane):
            dead, _plane = _plane, None
            with suppress(DataplaneError):
                dead.close()
        if _plane is None or _pid != os.getpid():
            address = _address(start=start)
            if address is None and config is not None:
                check_host(config)
            _plane, _pid = connect(address, config=config), os.getpid()
            _by_ray = ray_job() if address == "ray" else None
            if _by_ray is not None:
                os.environ[_INHERITED] = _plane.address
        return _plane


def has_ended(plane: Plane) -> bool:
    """Whether the plane's node, as far as a call has noticed, or its Ray job has ended."""
    if _by_ray is not None and _by_ray != ray_job():
        return True
    try:
        plane._inner.check()  # as each of its calls begins
    except DataplaneError:
        return True
    return False


def _address(*, start: bool) -> str | None:
    known = environment().address
    if known is not None:
        return known
    if ray_job() is not None:
        return "ray"
    inherited = os.environ.get(_INHERITED)
    if inherited is not None and inherited != _own_address():
        return inherited
    if _before_fork is not None:
        raise Misuse(_FORKED)
    if start:
        return None
    raise Misuse(_NO_NODE)


def _own_address() -> str | None:
    """The address of a node of a Ray job that has ended, if this process has set it in the environment."""
    return os.environ.get(_INHERITED) if _by_ray is not None and _pid == os.getpid() else None


def _forked() -> None:
    global _before_fork, _freeing_starts, _lock
    _lock, _freeing_starts = threading.Lock(), threading.Lock()  # a thread of the parent may have held them
    _before_fork = ray_job() or _before_fork


def _end() -> None:
    with suppress(DataplaneError):
        close()


atexit.register(_end)
os.register_at_fork(after_in_child=_forked)


_freed: SimpleQueue[BatchRef | threading.Event] = SimpleQueue()
_freeing_starts = threading.Lock()
_frees_in = 0  # the process that has the thread


class Watch:
    """Frees the stored value `ref` once all of its `users`, tensors and handles in this process, are gone.

    Finalizers notice that. They run at any point, also within a call to the plane or during garbage collection, so they
    only add an entry to a queue that may be used there (`queue.SimpleQueue`), and a thread of this module frees the
    entries.

    Invariants: a value is not freed while it is used in this process. The values of a node that has ended need not be
    freed.
    """

    def __init__(self, ref: BatchRef, users: Iterable[Any]) -> None:
        _start_freeing()
        self._ref = ref
        self._made_in = os.getpid()
        held = list(users)
        self._left: list[None] = [None] * len(held)
        self._finalizers = [weakref.finalize(user, self._gone) for user in held]
        for finalizer in self._finalizers:
            finalizer.atexit = False

    @property
    def active(self) -> bool:
        """Whether it will free something."""
        return any(finalizer.alive for finalizer in self._finalizers)

    def cancel(self) -> None:
        """Leave the value to another owner. Idempotent."""
        for finalizer in self._finalizers:
            finalizer.detach()

    def _gone(self) -> None:
        self._left.pop()  # at once, whichever threads lose users at the same time
        if not self._left and self._made_in == os.getpid():  # the parent of a forked child still has them
            _freed.put(self._ref)


def settle(timeout: float = 30.0) -> bool:
    """Wait until all entries of the queue are freed. Returns False if the timeout was reached before."""
    done = threading.Event()
    _start_freeing()
    _freed.put(done)
    return done.wait(timeout)


def _start_freeing() -> None:
    global _frees_in
    with _freeing_starts:
        if _frees_in != os.getpid():  # a forked child has no threads
            _frees_in = os.getpid()
            threading.Thread(target=_free, name="dataplane-freeing", daemon=True).start()


def _free() -> None:
    while True:
        noted = _freed.get()
        if isinstance(noted, threading.Event):
            noted.set()
            continue
        with suppress(DataplaneError):  # its node has gone with it, or is away and gets the free later
            plane().free(noted)
        del noted
