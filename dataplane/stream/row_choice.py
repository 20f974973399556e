"""Chooses the rows of a demand: passes the candidates to the sampler, and checks the sampler's choice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dataplane.batch.field import MEASURED
from dataplane.errors import Misuse
from dataplane.stream.lease import Who
from dataplane.stream.page import PAGE, Index
from dataplane.stream.partition_state import StreamState
from dataplane.stream.sampler import Candidates, Fifo, Sampler, checked

_WINDOW = 16 * PAGE  # candidates that a sampler gets first; four times as many if it chooses too few


@dataclass(frozen=True, slots=True)
class SamplerInputs:
    """The metadata that a sampler reads."""

    needs: tuple[str, ...]
    tags_read: tuple[str, ...]


@dataclass(slots=True)
class Demand:
    """A request for rows."""

    task: int
    rows: int
    min_rows: int
    columns: tuple[str, ...]
    sampler: Sampler | None
    """None for the oldest rows, or if the client has chosen itself (`LeasedRows.take`)."""
    who: Who
    lease_s: float

    @property
    def needed(self) -> tuple[str, ...]:
        """The columns that a row must have: the requested ones, and those whose lengths the sampler reads."""
        return needed(self.columns, self.sampler)


def needed(columns: tuple[str, ...], sampler: Any) -> tuple[str, ...]:
    """The columns that a row must have to be a candidate."""
    return (*columns, *(name for name in getattr(sampler, "needs", ()) if name not in columns))


def choose(
    partition: StreamState, demand: Demand, now: float, *, closed: bool, expire: Callable[[int, Index], None]
) -> Index:
    """The rows for the demand: at least as many as `least` returns, or none. Fewer are allowed if the sampler declares
    its choice `full`, or if it was shown all rows left in a closed stream. Rows that the sampler expires are passed to
    `expire(task, rows)`, with all rows of their groups if it has a `group_size`. Raises Misuse, and the errors of the
    sampler."""
    ready_rows, enough = partition.progress.ready, least(partition, demand, closed=closed)
    if demand.sampler is None or isinstance(demand.sampler, Fifo):  # takes the first ready rows
        first = ready_rows(demand.task, demand.columns, demand.rows)
        return first if len(first) >= enough else first[:0]
    whole = getattr(demand.sampler, "sees_all", False)
    window = partition.rows.count if whole else max(_WINDOW, 2 * demand.rows)
    while True:
        ready = ready_rows(demand.task, demand.needed, window)
        if not len(ready):
            return ready
        whole = whole or len(ready) < window
        shown = candidates(partition, demand.task, ready, demand.sampler, now, closed=closed, whole=whole)
        choice = checked(demand.sampler.choose(shown, demand.rows), shown, demand.rows)
        stale = ready[choice.expired]
        if len(stale) and getattr(demand.sampler, "group_size", None):
            stale = partition.whole_groups(demand.task, stale)
        expire(demand.task, stale)
        if choice.full or whole or len(choice.rows) >= demand.rows:
            chosen: Index = ready[choice.rows]
            last = closed and len(ready) == partition.progress.is_left(demand.task)  # no more rows can be chosen
            return chosen if choice.full or last or len(chosen) >= enough else chosen[:0]
        window *= 4


def least(partition: StreamState, demand: Demand, *, closed: bool) -> int:
    """The number of rows for which the demand waits: `min_rows`, or the rows left if the stream is closed and fewer are
    left."""
    return min(demand.min_rows, partition.progress.is_left(demand.task)) if closed else demand.min_rows


def candidates(
    partition: StreamState, task: int, rows: Index, sampler: Any, now: float, *, closed: bool, whole: bool
) -> Candidates:
    """These rows as candidates for a sampler of the task. Raises Misuse for a column without lengths."""
    needs = getattr(sampler, "needs", ())
    for name in needs:
        field = partition.rows.schema.fields.get(name)
        if field is not None and field.kind not in MEASURED:
            raise Misuse(f"a sampler needs the lengths of {name!r}, and a {field.kind} column has none")
    places = partition.rows.places(rows)
    group = partition.metadata.groups(places)
    members, dropped = partition.groups.sizes(group, task)
    return Candidates(
        group=group,
        version=partition.metadata.versions(places),
        age_s=now - partition.metadata.arrived(places),
        group_rows=members,
        group_dropped=dropped,
        lengths={name: partition.metadata.lengths(places, name) for name in needs},
        tags=partition.metadata.tags(places, getattr(sampler, "tags_read", ())),
        latest=partition.metadata.latest,
        closed=closed,
        whole=whole,
    )
