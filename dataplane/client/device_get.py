"""The destination of a `get`: the caller's tensors, a device, or the ranks of a group.

Copies to devices are ordered by the current stream of the caller's thread. Copies to host memory are divided among the
plane's threads. Large ones of a plane of an event loop are made in a thread, whichever way they go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, Protocol

from dataplane import threads
from dataplane.batch import copy_into
from dataplane.batch.batch import Batch
from dataplane.batch.ref import BatchRef
from dataplane.batch.row_sources import Job
from dataplane.device import ordering
from dataplane.errors import DataplaneError

_SHARED = 4  # jobs from which on threads share them


class AsyncReader(Protocol):
    """The source of the rows: an `AsyncPlane`."""

    @property
    def address(self) -> str:
        """The node of this host that it reads from."""

    async def get(self, ref: BatchRef, *, timeout: float) -> Batch:
        """The rows of the reference."""


def nbytes(batch: Batch, device: Any, out: Mapping[str, Any] | None) -> int:
    """How many bytes `placed` copies, at most."""
    if device is not None and device.type != "cpu":
        return batch.nbytes
    return sum(batch[name].nbytes for name in out if name in batch) if isinstance(out, Mapping) else 0


def placed(
    batch: Batch, device: Any, out: Mapping[str, Any] | None, pool: Executor, streams: Sequence[Any] = ()
) -> Batch:
    """The batch on a device, after its columns were copied into `out`. No copy is running any more when this returns
    or raises. `streams`: the caller's, where this is another thread. Raises as `Batch.to` and `copy_into.jobs`."""
    with ordering.as_called(streams):
        if out is not None:
            jobs = copy_into.jobs(batch, out)
            if len(jobs) >= _SHARED and _on_host(out):
                threads.together(pool, _do, jobs)
            else:
                for job in jobs:
                    job()
        return batch if device is None else batch.to(device)


def _do(job: Job) -> None:
    job()


def _on_host(out: Mapping[str, Any]) -> bool:
    return all(getattr(getattr(target, "device", None), "type", "cpu") == "cpu" for target in out.values())


async def together(plane: AsyncReader, ref: BatchRef, group: Any, timeout: float) -> Batch:
    """`collective.get` for a plane of an event loop: it waits in a thread. Cancelled, it ends the call on all ranks."""
    from dataplane import collective  # seldom needed

    loop = asyncio.get_running_loop()

    class Waiting:
        address = plane.address

        def get(self, ref: BatchRef, *, timeout: float) -> Batch:
            return asyncio.run_coroutine_threadsafe(plane.get(ref, timeout=timeout), loop).result()

    calling = asyncio.ensure_future(asyncio.to_thread(collective.get, ref, group, plane=Waiting(), timeout=timeout))
    try:
        return await asyncio.shield(calling)
    except asyncio.CancelledError:
        collective.interrupt(group)
        with suppress(DataplaneError):
            await calling
        raise
