"""This process's part in a job: its plane, the job's settings, and the sampler that it uses.

What always holds: no controller; a process has one session, a forked child its own; who called `init()` first in the
job clears all of it with `close()`, others only leave.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from typing import Any

from dataplane.client.sync import Plane
from dataplane.config import environment
from dataplane.errors import Misuse
from dataplane.integrations import process
from dataplane.integrations.transfer_queue import settings as told
from dataplane.integrations.transfer_queue import standing, twins
from dataplane.integrations.transfer_queue.errors import NotStarted
from dataplane.integrations.transfer_queue.partition import PREFIX, Partition
from dataplane.integrations.transfer_queue.samplers import BaseSampler
from dataplane.integrations.transfer_queue.settings import Settings

_NOT_STARTED = (
    "no data plane is known to this process: call transfer_queue.init() here, or first in the process that starts this"
    " one; or start a node (`dataplane node`) and put its address into DATAPLANE_ADDRESS"
)

_KEPT = 1024  # partitions whose home is remembered

_lock = threading.Lock()
_session: Session | None = None
_pid = 0


class Session:
    """What the calls of this process use. `first`: this process made the job's settings."""

    def __init__(self, plane: Plane, settings: Settings, sampler: BaseSampler | None, *, first: bool) -> None:
        self.plane = plane
        self.settings = settings
        self.sampler = sampler or settings.made()
        self.first = first
        self._partitions: dict[str, Partition] = {}

    def partition(self, name: str) -> Partition:
        """The partition of this name. Raises ValueError for what is no name."""
        found = self._partitions.get(name)
        if found is None:
            if len(self._partitions) >= _KEPT:
                self._partitions.clear()
            lost = partial(self._partitions.pop, name, None)
            found = self._partitions[name] = Partition(self.plane, name, lost)
        return found

    def partitions(self) -> list[str]:
        """The names of those that are there."""
        return [name.removeprefix(PREFIX) for name in self.plane.tables() if name.startswith(PREFIX)]


def init(conf: Any = None) -> Any:
    """Take part in the job, and start a plane for it where none is known. The configuration, as it is used.

    With Ray initialised, a node runs on each Ray node. Without, `$DATAPLANE_ADDRESS` names one; where it does not, one
    is started for this process and its children. Of `conf`, a mapping as TransferQueue takes it, what is used is
    `controller.sampler`, `controller.polling_mode`, and `backend.Dataplane`: `dense` and `node`. What the first
    `init()` of the job was told holds for all, but for samplers of the user's own.

    Raises ValueError for what `conf` can not say, PeerUnavailable, Rejected (the host can not meet `node`).
    """
    global _session, _pid
    wanted, own = told.read(conf, dense=standing.dense())
    with _lock:
        plane = _plane(told.node_config(conf))
        settings, first = told.agree(plane, wanted)
        before = _session if _session is not None and _pid == os.getpid() else None
        sampler = own or (before.sampler if before is not None and settings == before.settings else None)
        _session, _pid = (
            Session(plane, settings, sampler, first=first or (before is not None and before.first)),
            os.getpid(),
        )
    return told.merged(conf, settings)


def _plane(config: Any) -> Plane:
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized() and environment().address is None:
        from dataplane.integrations import ray as nodes

        nodes.up(config)
        return process.plane()
    return process.start(config)


def session() -> Session:
    """That of this process; where it has none yet, it takes part in the job that is known to it. Raises NotStarted."""
    global _session, _pid
    found = _session
    if found is not None and _pid == os.getpid():
        return found
    with _lock:
        if _session is None or _pid != os.getpid():
            try:
                plane = process.plane()
            except Misuse as error:
                raise NotStarted(_NOT_STARTED) from error
            settings = told.find(plane) or Settings(dense=standing.dense())
            sampler = _session.sampler if _session is not None else None  # the parent's, in a forked child
            _session, _pid = Session(plane, settings, sampler, first=False), os.getpid()
        return _session


def close() -> None:
    """Leave the job; where this process was its first, all partitions go. Idempotent.

    The plane stays, as other doors of this process may use it; it ends with the process.
    """
    global _session
    with _lock:
        left, _session = _session, None
    if left is None or _pid != os.getpid():
        return
    twins.end()
    if left.first:
        for name in left.partitions():
            left.partition(name).table.drop()
        told.forget(left.plane)
