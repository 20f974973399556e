"""A stream of one node (`node.local.unreplicated`) with fewer words: what came of each request is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
from dataplane.stream.leased_rows import LeasedRows
from dataplane.stream.page import Index
from dataplane.stream.sampler import Fifo
from dataplane.stream.settings import StreamSettings
from dataplane.stream.statistics import figures

NONE: Index = np.empty(0, np.int64)
INT, INTS = Field("dense", "int64", ()), Field("ragged", "int64", (None,))


def stored(shard: int, rows: int, *columns: str, field: Field = INT) -> BatchRef:
    """A reference to rows of one shard. The column `ids` is ragged."""
    fields = [(name, INTS if name == "ids" else field) for name in columns]
    return ref_to(b"the-node", rows, [(name, of, 8 * rows, shard, i) for i, (name, of) in enumerate(fields)])


@dataclass(eq=False)
class Asked:
    """The results (tickets or grants) and the errors of a request."""

    got: list[Any] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    waiting: WaitingRequest | None = None

    @property
    def grant(self) -> RowLease:
        (grant,) = self.got
        return grant

    @property
    def rows(self) -> list[int]:
        return self.grant.rows.tolist() if self.got else []


class Stream:
    """Each append and each extend is a shard of its own, counted from 1. `now`: the time of all requests."""

    def __init__(self, settings: StreamSettings, mark: str = "", now: float = 0.0) -> None:
        self.released: list[int] = []
        self.shards = 0
        self.now = now
        self.alone = UnreplicatedStream("s", settings, mark, self, lambda: self.now)

    def free(self, batches: Sequence[ColumnBatch]) -> None:
        self.released += [batch.ref.shards()[0][1] for batch in batches]

    def read(self, refs: Sequence[BatchRef]) -> None:
        pass

    unread = read

    @property
    def leased(self) -> LeasedRows:
        return self.alone.leased

    def figures(self) -> dict[str, Any]:
        return figures(self.leased, self.now, self.alone.machine.pending())

    def run(self, request: Any) -> Any:
        return self.alone.run(request)

    def settle(self, now: float) -> None:
        """Go on to a time, and do what is due then."""
        self.now = now
        self.alone.settle()

    def _result(self, found: Any) -> Any:
        return found.ticket if isinstance(found, r.AdmitResult) else self.leased.leases.live(found.grant)

    def _wait(self, request: Any, queue: str) -> Asked:
        asked = Asked()

        def over(outcome: Any) -> None:
            if isinstance(outcome, DataplaneError):
                asked.errors.append(outcome)
            elif outcome != NOTHING:
                asked.got.append(self._result(outcome))

        if isinstance(request, r.Admit) or not self.alone.waiters.has(queue):
            try:
                over(self.run(request))
            except (NotReady, Backpressure):
                pass
            except DataplaneError as error:
                if isinstance(request, r.Admit):
                    raise
                asked.errors.append(error)
            if asked.got or asked.errors:
                return asked
        asked.waiting = WaitingRequest(queue, request, over)
        self.alone.add(asked.waiting)
        return asked

    def ask(self, rows: int, version: int = 0, client: str = "p", nbytes: int | None = None) -> Asked:
        queue = f"append {version}" if self.leased.settings.max_lag >= 0 else "append"
        size = 8 * rows if nbytes is None else nbytes
        return self._wait(r.Admit(client=client, rows=rows, nbytes=size, version=version), queue)

    def come(
        self, asked: Asked, rows: int, *, version: int = 0, columns: Sequence[str] = ("x",), **said: Any
    ) -> tuple[int, bool]:
        self.shards += 1
        ref = stored(self.shards, rows, *columns, field=said.pop("field", INT))
        versions, ticket = np.full(rows, version, np.int64), asked.got[0]
        given = {name: value for name, value in said.items() if value is not None}
        try:
            found = self.run(r.Append(client="p", ref=ref, versions=versions, ticket=ticket, **given))
        except DataplaneError:
            self.give_back(asked)
            raise
        return found.first, found.new

    def append(self, rows: int, **said: Any) -> tuple[int, bool]:
        return self.come(self.ask(rows, said.get("version", 0)), rows, **said)

    def give_back(self, asked: Asked) -> None:
        self.run(r.GiveBack(client="p", ticket=asked.got[0]))

    def demand(
        self,
        rows: int = 100,
        task: str = "actor",
        *,
        least: int = 1,
        columns: Sequence[str] = ("x",),
        sampler: Any = None,
        who: Who | None = None,
        chosen: Index = NONE,
        expired: Index = NONE,
    ) -> r.Consume:
        who = who or Who("c")
        return r.Consume(
            client=str(who.client),
            task=task,
            columns=tuple(columns),
            rows=rows,
            min_rows=least,
            sampler=sampler,
            chosen=chosen,
            expired=expired,
            lease_s=10.0,
            member=who.member,
            replica=who.replica,
            replicas=who.replicas,
        )

    def consume(self, *args: Any, sampler: Any = None, **how: Any) -> Asked:
        request = self.demand(*args, sampler=sampler or Fifo(), **how)
        queue = repr((request.task, request.rows, request.min_rows, request.columns, request.sampler, request.replica))
        return self._wait(request, queue)

    def withdraw(self, asked: Asked) -> None:
        if asked.waiting is not None and not asked.got and not asked.errors:
            self.alone.waiters.withdraw(asked.waiting)

    def extend(
        self, rows: Sequence[int] | Index, *columns: str, by: RowLease | None = None, replace: bool = False
    ) -> None:
        """More columns, brought by a holder or, if nobody is named, by key."""
        self.shards += 1
        numbers = np.asarray(rows, np.int64)
        holds = NONE if by is None else np.full(len(numbers), by.hold)
        ref = stored(self.shards, len(numbers), *columns)
        self.run(r.Extend(rows=numbers, ref=ref, lengths={}, replace=replace, holds=holds))

    def ack(self, grant: RowLease, client: str = "c") -> None:
        self.run(r.Ack(client=client, grant=grant.number))

    def nack(self, grant: RowLease, client: str = "c", *, seen: bool = True) -> None:
        self.run(r.Nack(client=client, grant=grant.number, seen=seen))

    def drop(self, *rows: int) -> None:
        self.run(r.Drop(rows=np.array(rows, np.int64)))
