"""The columns that a producer adds to existing rows.

A producer is usually a consumer that extends the rows of its delivery. If its lease has ended meanwhile, the rows go to
another consumer, which adds the same columns. Invariant: the columns of the next holder replace those of an earlier
holder that has not acked. Columns of an earlier holder are refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.errors import LeaseExpired, Misuse
from dataplane.stream.column_batch import Hold
from dataplane.stream.leased_rows import LeasedRows
from dataplane.stream.page import Index
from dataplane.stream.progress import DEAD, LEASED, PENDING
from dataplane.stream.requests import Extend
from dataplane.stream.settings import MAX_TASKS


def replaces(leased: LeasedRows, rows: Index, ref: BatchRef, holds: Index) -> bool:
    """Whether these columns replace those of an earlier holder that has not acked. `holds`: the delivery number of each
    row; empty: of none. Raises LeaseExpired if rows of the delivery are gone or no longer leased to it, and the errors
    of `_require`."""
    _require(leased, rows, ref, holds)
    again = [
        hold > 0 and _holder_again(leased, rows[holds == hold], hold, ref.columns) for hold in np.unique(holds).tolist()
    ]
    return len(again) > 0 and all(again)


def extend(leased: LeasedRows, command: Extend, spares: Sequence[bytes]) -> None:
    """Add columns to rows. `spares`: nodes that have copies of them. Raises the errors of `_require`, Misuse for an
    existing column unless it is replaced, SchemaMismatch for another type, LimitExceeded for too many columns."""
    rows, holds = command.rows, command.holds
    _require(leased, rows, command.ref, holds)  # the state may have changed since it was decided
    under = np.unique(holds)
    hold: Hold = -1
    if len(under) > 1:
        hold = np.where(holds > 0, holds, -1)
    elif len(under) and under[0] > 0:
        hold = int(under[0])
    # Only the leader knows the readers of replaced columns: replicas keep these until its `FreeReplacedCommand`.
    readers = leased.leases.holding(rows) if command.replace else set()
    replaced = leased.partition.extend(
        rows,
        command.ref,
        command.lengths,
        replace=command.replace,
        hold=hold,
        keep=command.replace,
        spares=spares,
    )
    if len(replaced):
        leased.replaced.keep(replaced, readers)


def _require(leased: LeasedRows, rows: Index, ref: BatchRef, holds: Index) -> None:
    """Raises LeaseExpired if rows that were delivered to this producer are gone. Raises Misuse for other rows that do
    not exist, rows in progress, rows named twice, and a reference with another number of rows."""
    if len(rows) != len(ref):
        raise Misuse(f"{len(ref)} rows of new columns for {len(rows)} rows")
    partition = leased.partition
    there = partition.rows.there(rows)
    if not there.all():
        partition.require(rows, (holds > 0) & (rows >= 0) & (rows < partition.rows.next) if len(holds) else None)
        raise LeaseExpired(
            f"{np.count_nonzero(~there)} of these rows are gone: they were acked, here or, after their lease, by"
            " others, or dropped; columns are added before the ack"
        )
    partition.unfinished.refuse(rows)
    if len(np.unique(rows)) != len(rows):
        raise Misuse("a row is named twice; each is extended once")


def _holder_again(leased: LeasedRows, rows: Index, hold: int, columns: Sequence[str]) -> bool:
    """Whether earlier holders of the same task added all of these columns that the rows have. `hold`: the delivery
    number of the rows. Raises LeaseExpired if the rows are not held under it any more."""
    number, task = divmod(hold, MAX_TASKS)
    grant, partition = leased.leases.live(number), leased.partition
    under = np.concatenate([partition.rows.holds(rows, name) for name in columns])
    others = under[under != -2]
    if grant is None or grant.task != task or not np.isin(rows, grant.rows).all():
        states = partition.progress.states(partition.rows.places(rows), len(rows))[task : task + 1]
        theirs = (others >= 0) & (others % MAX_TASKS == task) & (others != hold)
        if leased.leases.ended_unacked(number) or np.isin(states, (PENDING, LEASED, DEAD)).any() or theirs.any():
            raise LeaseExpired(
                "these rows are not leased to this delivery any more: the lease ended or they were given back, and they"
                " go to others; columns computed from them are not added"
            )
        return False
    # A replica that was restarted is given the same grant again.
    return bool(((others >= 0) & (others % MAX_TASKS == task) & ((others != hold) | grant.shared)).all())
