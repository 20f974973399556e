"""A stream of one node (`node.local.unreplicated`) with fewer words: who waits is told by callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.batch.ref import BatchRef
from dataplane.errors import Backpressure, DataplaneError, NotReady
from dataplane.node.local.unreplicated import UnreplicatedStream
from dataplane.node.partitions.waiters import NOTHING, WaitingRequest
from dataplane.stream import requests as r
from dataplane.stream.column_batch import ColumnBatch
from dataplane.stream.lease import RowLease, Who
from dataplane.stream.page import Index
from dataplane.stream.refusal import refusal
from dataplane.stream.row_metadata import Arrival
from dataplane.stream.settings import StreamSettings
from dataplane.stream.statistics import figures

NONE: Index = np.empty(0, np.int64)
INT = Field("dense", "int64", ())


def stored(shard: int, rows: int, *columns: str, field: Field = INT) -> BatchRef:
    """A reference to rows of one shard."""
    return ref_to(b"the-node", rows, [(name, field, 8 * rows, shard, i) for i, name in enumerate(columns)])


@dataclass(eq=False)
class Entry:
    """Somebody who asks leave to append. `admit(ticket)` is called once, or `fail(error)`."""

    client: str
    rows: int
    nbytes: int
    version: int
    admit: Callable[[int], None]
    fail: Callable[[Exception], None]

    def asked(self) -> r.Admit:
        return r.Admit(client=self.client, rows=self.rows, nbytes=self.nbytes, version=self.version)


@dataclass(eq=False)
class Demand:
    """Somebody who asks for rows. `serve(grant)` is called once when there are some, `fail(error)` when there will be
    none."""

    task: int
    rows: int
    min_rows: int
    columns: tuple[str, ...]
    sampler: Any
    who: Who
    lease_s: float
    serve: Callable[[RowLease], None]
    fail: Callable[[Exception], None]

    def asked(self, tasks: Sequence[str], chosen: Index = NONE, expired: Index = NONE) -> r.Consume:
        return r.Consume(
            client=str(self.who.client),
            task=tasks[self.task],
            columns=self.columns,
            rows=self.rows,
            min_rows=self.min_rows,
            sampler=self.sampler,
            chosen=chosen,
            expired=expired,
            lease_s=self.lease_s,
            member=self.who.member,
            replica=self.who.replica,
            replicas=self.who.replicas,
        )


class Home:
    """The stream; what it does not have is asked of its `stream.leased_rows.LeasedRows`."""

    def __init__(
        self,
        settings: StreamSettings,
        released: Callable[[list[ColumnBatch]], None] = lambda _: None,
        mark: str = "",
        now: float = 0.0,
    ) -> None:
        self.alone = UnreplicatedStream("s", settings, mark, self, now)
        self.free = released
        self._waiting: dict[Any, WaitingRequest] = {}

    def read(self, refs: Sequence[BatchRef]) -> None:
        pass

    unread = read

    def __getattr__(self, name: str) -> Any:
        return getattr(self.alone.leased, name)

    def run(self, asked: Any, now: float) -> Any:
        return self.alone.run(asked, now)

    def figures(self, now: float) -> dict[str, Any]:
        return figures(self.alone.leased, now, self.alone.machine.pending())

    def _ask(self, who: Any, asked: Any, queue: str, done: Callable[[Any], None], now: float) -> None:
        if isinstance(asked, r.Admit) or not self.alone.waiters.has(queue):
            try:
                outcome = self.alone.run(asked, now)
            except (NotReady, Backpressure):
                pass
            else:
                done(outcome)
                return

        def over(outcome: Any) -> None:
            del self._waiting[who]
            if isinstance(outcome, DataplaneError):
                who.fail(outcome)
            elif outcome != NOTHING:
                done(outcome)

        self._waiting[who] = waiting = WaitingRequest(queue, asked, over)
        self.alone.wait(waiting, now)

    def admit(self, entry: Entry, now: float = 0.0) -> None:
        queue = f"append {entry.version}" if self.alone.leased.settings.max_lag >= 0 else "append"
        self._ask(entry, entry.asked(), queue, lambda found: entry.admit(found.ticket), now)

    def withdraw(self, entry: Entry, now: float = 0.0) -> str:
        """It waits no longer; why it did."""
        why = str(refusal(self.alone.leased, self.alone.machine.entry_of(entry.asked())))
        self.alone.waiters.withdraw(self._waiting[entry])
        self.alone.settle(now)
        return why.removeprefix("the stream is full (").removesuffix(")")

    def append(
        self, ticket: int, ref: BatchRef, keys: Sequence[str], digest: bytes, arrival: Arrival, now: float
    ) -> tuple[int, bool]:
        admitted = self.admission.ticket(ticket)
        assert admitted is not None
        asked = r.Append(
            client=admitted.client,
            ref=ref,
            versions=arrival.versions,
            groups=None if arrival.groups is None else list(arrival.groups),
            keys=list(keys),
            digest=digest,
            tags={name: list(values) for name, values in arrival.tags.items()},
            lengths=dict(arrival.lengths),
            ticket=ticket,
        )
        try:
            found = self.run(asked, now)
        except DataplaneError:
            self.give_back(ticket, now)
            raise
        return found.first, found.new

    def give_back(self, ticket: int, now: float = 0.0) -> None:
        admitted = self.admission.ticket(ticket)
        if admitted is not None:
            self.run(r.GiveBack(client=admitted.client, ticket=ticket), now)

    def extend(
        self,
        rows: Index,
        ref: BatchRef,
        lengths: Mapping[str, Index],
        now: float,
        *,
        replace: bool = False,
        holds: Index | None = None,
    ) -> None:
        holds = NONE if holds is None else holds
        self.run(r.Extend(rows=rows, ref=ref, lengths=dict(lengths), replace=replace, holds=holds), now)

    def consume(self, demand: Demand, now: float) -> None:
        asked = demand.asked(self.settings.tasks)
        queue = repr((demand.task, demand.rows, demand.min_rows, demand.columns, demand.sampler, demand.who.replica))
        try:
            self._ask(demand, asked, queue, lambda found: demand.serve(self.leases.live(found.grant)), now)
        except DataplaneError as error:
            demand.fail(error)

    def forget(self, demand: Demand) -> None:
        if demand in self._waiting:
            self.alone.waiters.withdraw(self._waiting[demand])

    def take(self, demand: Demand, chosen: Index, expired: Index, now: float) -> RowLease | None:
        try:
            found = self.run(demand.asked(self.settings.tasks, chosen, expired), now)
        except NotReady:
            return None
        grant: RowLease | None = self.leases.live(found.grant)
        return grant

    def ack(self, number: int, client: str, replica: int | None, now: float) -> None:
        self.run(r.Ack(client=client, grant=number, replica=replica), now)

    def nack(self, number: int, client: str, replica: int | None, now: float, *, seen: bool = True) -> None:
        self.run(r.Nack(client=client, grant=number, replica=replica, seen=seen), now)

    def tick(self, now: float) -> None:
        self.alone.settle(now)

    def leave(self, client: str, now: float) -> None:
        for who, waiting in list(self._waiting.items()):
            if waiting.request.client == client:
                self.alone.waiters.withdraw(waiting)
                self._waiting.pop(who, None)
        self.run(r.EndClient(client=client, ended=True), now)

    def drop_rows(self, rows: Index, now: float) -> None:
        self.run(r.Drop(rows=rows), now)

    def close(self, now: float) -> None:
        self.run(r.Close(), now)

    def drop(self, now: float = 0.0) -> None:
        self.alone.end(now)
