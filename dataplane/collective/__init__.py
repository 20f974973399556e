"""Batches between the ranks of a `torch.distributed` group: broadcast, scatter, gather, and a get by all together.

    batch = dataplane.collective.broadcast(ref if rank == 0 else None, group, plane=plane)

Every rank of the group makes the same call, in the same order, as with the collectives of torch. `group` is what
`torch.distributed.new_group` returned, or None for all ranks; of any backend.

How it goes. The ranks say through rank 0 what each asks for, and have the answer before a byte moves (`agreeing`). A
rank that has the rows reads them from its plane once, and sends each distinct stored row once (`packing`): straight
from the shared memory where the rows lie in one run, in pieces of at most 4 MiB, and from each rank to the next, which
passes a piece on while the one after it arrives (`moving`). So a rank receives each byte once and sends it at most
once. What arrives lies as it is going to be read: it becomes the batch without another copy. Last, all say that they
are done.

Invariants:

- All ranks return, or all raise; the one exception is a rank that goes in the instant in which the others learn that
  all are done.
- A call ends within its timeout and one second more. Where a rank raises, the others raise the same error, and its
  message names the rank; where one has gone, is stopped or does not come, they raise PeerUnavailable, which names it.
  Where ranks ask for different things, all raise Misuse, which says who asked for what.
- The connections between the ranks are this module's own, over gloo, made at the first call of a group. So what fails
  here leaves the caller's group as it was. After a failure they are made anew by the next call.
- Nothing is pickled. Layouts and errors are MessagePack.
- A received batch lies in memory of its rank. It pins nothing in the store, and stays when the rows are freed. Its
  arrays and its tensors are the same memory.

On a host without devices, `plane.get(ref)` in each rank maps the same memory and copies nothing: ask by group where the
rows are on another host, or go to devices.

Rejected: `torch.distributed.broadcast_object_list`, which pickles. The collectives of the caller's group: one that is
broken off leaves the group unusable, and its timeout is the group's. The tree of `torch.distributed.broadcast`: it
sends a byte twice over the link of one rank, and passes nothing on before all has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dataplane.batch.batch import Batch
from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.collective import calls
from dataplane.collective.calls import Reader
from dataplane.collective.link import link_of
from dataplane.errors import Misuse

TIMEOUT_S = 60.0
"""The deadline, in seconds, of a call that names none."""


def broadcast(
    ref: BatchRef | None, group: Any, *, plane: Reader, device: Any = None, timeout: float = TIMEOUT_S
) -> Batch:
    """The rows that one rank names, on all ranks.

    ref: at the source, what to read; None on all other ranks.
    plane: whence the source reads; the others' are not used.
    device: where the tensors of the batch are to be: see `Batch.to`.

    Raises Misuse where not exactly one rank has a reference, or ranks call differently; what the source's `get` raises,
    on all ranks; PeerUnavailable where a rank fails, has gone or does not come in `timeout` seconds; LimitExceeded
    where a rank has no memory for the rows.
    """
    return calls.broadcast(_optional(ref), group, plane, device, _deadline(timeout))


def scatter(
    refs: Sequence[BatchRef] | None, group: Any, *, plane: Reader, device: Any = None, timeout: float = TIMEOUT_S
) -> Batch:
    """Of the references of one rank, the rows of a different one on each rank.

    refs: at the source, one reference a rank, in the order of ranks; None on all other ranks. Their numbers of rows and
    their lengths may differ, their columns too. Otherwise as `broadcast`; Misuse also where there are more or fewer
    than ranks.
    """
    if refs is not None:
        refs = [_reference(ref) for ref in refs]
    return calls.scatter(refs, group, plane, device, _deadline(timeout))


def gather(
    ref: BatchRef, group: Any, *, plane: Reader, dst: int = 0, device: Any = None, timeout: float = TIMEOUT_S
) -> list[Batch] | None:
    """The rows that each rank names, on one rank: batches in the order of ranks there, None on all others.

    dst: which, by its rank in the group; the same on all ranks. Otherwise as `broadcast`.
    """
    return calls.gather(_reference(ref), group, plane, dst, device, _deadline(timeout))


def get(ref: BatchRef, group: Any, *, plane: Reader, device: Any = None, timeout: float = TIMEOUT_S) -> Batch:
    """The rows that this rank names. What several ranks of a host ask for is read from the store by one of them.

    ref: what this rank wants; ranks may want the same or different rows and columns. `plane.get(ref, group=group)` is
    this. Raises what the `get` of any of the ranks raises, on all of them; otherwise as `broadcast`.
    """
    return calls.get(_reference(ref), group, plane, device, _deadline(timeout))


def interrupt(group: Any) -> None:
    """End the call that a thread of this process is in, on all ranks: it raises PeerUnavailable. Any thread may do
    this; where no call is under way it does nothing but have the next one connect anew."""
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
