"""Requests that a leader answers from the rows without a command."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from dataplane.errors import LeaseExpired, LimitExceeded, Misuse, NotReady
from dataplane.stream import requests as r
from dataplane.stream.page import NONE, PAGE
from dataplane.stream.progress import DEAD
from dataplane.stream.results import held_rows
from dataplane.stream.row_choice import SamplerInputs, candidates, needed
from dataplane.stream.snapshot import StreamSnapshot
from dataplane.stream.statistics import figures

if TYPE_CHECKING:
    from dataplane.stream.leader import StreamLeader

MAX_SNAPSHOTS = 4
"""Snapshots of one client at a time. Each is a copy of the metadata of all rows."""

MAX_BLOCK = 2 << 20
"""Bytes of the rows in one answer, so that they fit a command of another stream. A single row may have more."""


def look(leader: StreamLeader, asked: r.Look, now: float) -> r.CandidateRows:
    """The candidates of a sampler; none if a grant waits for this replica. Raises NotReady if no rows are ready or
    nothing changed since `asked.seen`, Closed if no row ever will be, Misuse for an unknown task."""
    leased, wants = leader.leased, SamplerInputs(asked.lengths, asked.tags)
    task, rows = leased.settings.task(asked.task), NONE
    if leased.leases.waiting(task, asked.who) is None:
        leased.expire_blocked(task, needed(asked.columns, wants))
        if leader.changes > asked.seen:
            rows = leased.partition.progress.ready(task, needed(asked.columns, wants), max(0, asked.most))
        if not len(rows):
            leased.check_drained(task)
            raise NotReady("no rows are ready", stream=leader.name, task=asked.task)
    shown = candidates(leased.partition, task, rows, wants, now, closed=leased.closed, whole=len(rows) < asked.most)
    return r.CandidateRows(
        changes=leader.changes,
        rows=rows,
        group=shown.group,
        version=shown.version,
        age_s=shown.age_s.tobytes(),
        group_rows=shown.group_rows,
        group_dropped=shown.group_dropped,
        lengths=dict(shown.lengths),
        tags={name: values.tolist() for name, values in shown.tags.items()},
        latest=shown.latest,
        closed=shown.closed,
        whole=shown.whole,
        left=leased.partition.progress.is_left(task),
    )


def find(leader: StreamLeader, asked: r.Find, now: float) -> r.FoundRows:
    partition = leader.leased.partition
    rows = partition.keys.known_rows(asked.keys)
    if asked.digest and (not asked.keys or partition.keys.known(asked.keys[0], asked.digest) is None):
        rows[:] = -1
    return r.FoundRows(np.where(partition.rows.there(rows), rows, -1))


def dead_letters(leader: StreamLeader, asked: r.ListDeadLetters, now: float) -> r.Letters:
    """The first dead letters of a task. Raises Misuse for an unknown task."""
    partition = leader.leased.partition
    rows = partition.progress.in_state(leader.leased.settings.task(asked.task), DEAD)[: max(0, asked.most)]
    columns = [
        name for name in partition.rows.schema.fields if len(rows) and (partition.rows.holds(rows, name) > -2).all()
    ]
    ref = partition.rows.ref(rows, columns) if columns else None
    groups, versions, tags = partition.labels(rows)
    reasons = partition.reasons[leader.leased.settings.task(asked.task)]
    return r.Letters(
        rows, ref, partition.keys.names(rows), groups, versions, tags, [reasons.get(row, "") for row in rows.tolist()]
    )


def unfinished(leader: StreamLeader, asked: r.ListUnfinished, now: float) -> r.UnfinishedRows:
    """The rows in progress, the oldest first. Never refused."""
    partition = leader.leased.partition
    rows = sorted(row for row in partition.unfinished.begun if row > asked.after)
    return r.UnfinishedRows(partition.listed(rows[: max(0, asked.most)], now))


def holding(leader: StreamLeader, asked: r.ListHeldColumns, now: float) -> r.HeldRows:
    """References to the columns on a node that rows need, split over several answers. Never refused."""
    stored = leader.leased.partition.rows.batches.stored(asked.after)
    needed = (each for each in stored if asked.node in each[1].nodes or asked.node in each[1].spares)
    return held_rows(needed, asked.after, asked.pieces, leader.outboxes.last(asked.node))


def measure(leader: StreamLeader, asked: r.Measure, now: float) -> r.PartitionFigures:
    return r.PartitionFigures(figures(leader.leased, now, leader.pending()))


class Snapshots:
    """The snapshots that clients of one leader read."""

    def __init__(self, term: int) -> None:
        self._taken: dict[tuple[str, int], tuple[StreamSnapshot, dict[bytes, int]]] = {}
        self._numbers = itertools.count(max(term, 0) << 32)

    @property
    def clients(self) -> set[str]:
        return {client for client, _ in self._taken}

    def outbox_limit(self, node: bytes, last: int) -> int:
        """The number of the last outbox entry that may be sent to a node, at most `last`. Later entries may free
        columns that a snapshot needs."""
        return min([last, *(lasts.get(node, 0) for _, lasts in self._taken.values())])

    def take(self, leader: StreamLeader, asked: r.TakeSnapshot, now: float) -> r.SnapshotTaken:
        """Take a snapshot. Raises LimitExceeded after `MAX_SNAPSHOTS` of a client."""
        count = 1 + sum(client == asked.client for client, _ in self._taken)
        if count > MAX_SNAPSHOTS:
            what = "snapshots of a client at a time"
            raise LimitExceeded(f"{count} {what}", what=what, asked=count, limit=MAX_SNAPSHOTS)
        snapshot, number = StreamSnapshot(leader.leased, now), next(self._numbers)
        self._taken[asked.client, number] = snapshot, {each.node: each.last for each in leader.outboxes.state()}
        if leader.columns is not None:
            leader.columns.read(snapshot.refs)
        return r.SnapshotTaken(number, snapshot.head, snapshot.pages)

    def read(self, leader: StreamLeader, asked: r.ReadSnapshot, now: float) -> r.SnapshotRows:
        """Rows of a snapshot. Raises LeaseExpired if it was released, or taken by an earlier leader, LimitExceeded if
        the rows are too large for an answer, and Misuse for an invalid range."""
        snapshot, _ = self._taken.get((asked.client, asked.snapshot), (None, None))
        if snapshot is None:
            raise LeaseExpired("another leads the partition since this snapshot was taken, or it was released")
        if asked.first < 0 or not 1 <= asked.count <= PAGE:
            raise Misuse(f"no rows {asked.first} and {asked.count} more of a snapshot")
        block = snapshot.block(asked.first, asked.count)
        if len(block) > MAX_BLOCK and asked.count > 1:
            what = "bytes of rows in one answer"
            raise LimitExceeded(f"{len(block)} {what}", what=what, asked=len(block), limit=MAX_BLOCK)
        return r.SnapshotRows(block, snapshot.columns(asked.first, asked.count))

    def release(self, leader: StreamLeader, asked: r.ReleaseSnapshot, now: float) -> r.Succeeded:
        self._release(leader, (asked.client, asked.snapshot))
        return r.Succeeded()

    def _release(self, leader: StreamLeader, key: tuple[str, int]) -> None:
        snapshot, _ = self._taken.pop(key, (None, None))
        if snapshot is not None and leader.columns is not None:
            leader.columns.unread(snapshot.refs)

    def leave(self, leader: StreamLeader, client: str | None = None) -> None:
        """Release the snapshots of a client that has gone; None: of all clients."""
        for key in [key for key in self._taken if client in (None, key[0])]:
            self._release(leader, key)
