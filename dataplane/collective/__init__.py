"""Batches between the ranks of a `torch.distributed` group: broadcast, scatter, gather, and a joint get.

    batch = dataplane.collective.broadcast(ref if rank == 0 else None, group, plane=plane)

Every rank of the group makes the same call, in the same order, as with the collectives of torch. `group` is the result
of `torch.distributed.new_group`, or None for all ranks; of any backend.

The ranks send their requests to rank 0, and have its answer before any bytes are sent (`agreement`). A rank with the
rows reads them from its plane once, and sends each distinct stored row once (`packing`): directly from the shared
memory if the rows lie in one run, in pieces of at most 8 MiB, and from each rank to the next, which forwards a piece
while it receives the following one (`exchange`). So a rank receives each byte once and sends it at most once. Received
bytes already have the layout of the batch, which needs no other copy. At the end, all ranks confirm.

If the group sends tensors of the ranks' devices by NCCL, large pieces of columns of numbers go from device to device
(`device_link`). All else goes over gloo (`link`).

Invariants:

- All ranks return, or all raise; the only exception is a rank that dies at the moment in which the others learn that
  all are done.
- A call ends at most one second after its timeout. If a rank raises, the others raise the same error, whose message
  names the rank; if one has died, is stopped or does not call, they raise PeerUnavailable, which names it. If ranks
  make different calls, all raise Misuse with the call of each.
- The connections between the ranks are this module's own, made at the first call of a group. So a failure
  here leaves the caller's group unchanged. After a failure, the next call makes new connections.
- Nothing is pickled. Layouts and errors are MessagePack.
- A received batch is in memory of its rank. It pins nothing in the store, and stays valid when the rows are freed. Its
  arrays and its tensors share memory.

On a host without devices, prefer `plane.get(ref)` in each rank, which maps the same memory and copies nothing. Use a
group if the rows are on another host, or are read into devices.

Rejected: `torch.distributed.broadcast_object_list`, which pickles. The collectives of the caller's group: an aborted
one leaves the group unusable, and its timeout is the group's. The tree of `torch.distributed.broadcast`: it sends a
byte twice over the link of one rank, and forwards nothing before all has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dataplane.batch.batch import Batch
from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.collective import calls
from dataplane.collective.calls import RowReader
from dataplane.collective.link import link_of
from dataplane.errors import Misuse

TIMEOUT_S = 60.0
"""The default timeout of a call, in seconds."""


def broadcast(
    ref: BatchRef | None, group: Any, *, plane: RowReader, device: Any = None, timeout: float = TIMEOUT_S
) -> Batch:
    """Send the rows of one rank's reference to all ranks, and return them as a batch.

    ref: at the source, the rows to read; None on all other ranks.
    plane: the plane that the source reads from; those of other ranks are not used.
    device: the device of the batch's tensors: see `Batch.to`.

    Raises Misuse unless exactly one rank has a reference, or if ranks call differently; the error of the source's
    `get`, on all ranks; PeerUnavailable if a rank fails, has died or does not call within `timeout` seconds;
    LimitExceeded if a rank has no memory for the rows.
    """
    return calls.broadcast(_optional(ref), group, plane, device, _deadline(timeout))


def scatter(
    refs: Sequence[BatchRef] | None, group: Any, *, plane: RowReader, device: Any = None, timeout: float = TIMEOUT_S
) -> Batch:
    """Send each rank the rows of its own reference in one rank's list, and return them as a batch.

    refs: at the source, one reference a rank, in the order of ranks; None on all other ranks. Their numbers of rows,
    their lengths and their columns may differ. Otherwise as `broadcast`; Misuse also if the number of references is not
    that of the ranks.
    """
    if refs is not None:
        refs = [_reference(ref) for ref in refs]
    return calls.scatter(refs, group, plane, device, _deadline(timeout))


def gather(
    ref: BatchRef, group: Any, *, plane: RowReader, dst: int = 0, device: Any = None, timeout: float = TIMEOUT_S
) -> list[Batch] | None:
    """Send the rows of each rank's reference to the rank `dst`. Returns there one batch a rank, in the order of ranks;
    on all other ranks None.

    dst: a rank of the group; the same number on all ranks. Otherwise as `broadcast`.
    """
    return calls.gather(_reference(ref), group, plane, dst, device, _deadline(timeout))


def get(ref: BatchRef, group: Any, *, plane: RowReader, device: Any = None, timeout: float = TIMEOUT_S) -> Batch:
    """Read the rows of this rank's reference. Rows that several ranks of a host request are read from the store by one
    of them.

    ref: the rows for this rank; ranks may want the same or different rows and columns. `plane.get(ref, group=group)`
    calls this. Raises the error of any rank's `get`, on all of them; otherwise as `broadcast`.
    """
    return calls.get(_reference(ref), group, plane, device, _deadline(timeout))


def interrupt(group: Any) -> None:
    """End the call in another thread of this process, on all ranks: it raises PeerUnavailable. Any thread may call
    this; without a call in progress, it only makes the next one connect again."""
    link_of(group).interrupt()


def _deadline(timeout: float) -> Deadline:
    try:
        seconds = float(timeout)
    except (TypeError, ValueError):
        raise Misuse(f"a timeout is a number of seconds, not {timeout!r}") from None
    if not 0 <= seconds < float("inf"):
        raise Misuse(f"a timeout is a number of seconds, not {timeout!r}")
    return Deadline.after(seconds)


def _optional(ref: Any) -> BatchRef | None:
    return None if ref is None else _reference(ref)


def _reference(ref: Any) -> BatchRef:
    if not isinstance(ref, BatchRef):
        raise Misuse(f"what was put is named by a BatchRef, not {type(ref).__name__}: pass what put() returned")
    return ref
