"""The tables of a node outside a cluster, by name, and the requests of clients about them.

A table is created by the first write and ends when it is dropped. The numbers of its rows continue those of the last
table with its name, so that no number is reused.

Invariants: the columns that rows need are kept, and others freed (`node.shards.needed_shards`). Columns that a client
staged and did not write are freed when the client ends. A waiting client is answered as soon as its rows are ready, or
at its deadline.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import OrderedDict
from functools import partial
from typing import Any, TypeAlias

import msgspec

from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.errors import LimitExceeded, Misuse, NotReady, ProtocolMismatch
from dataplane.node.sessions import checks
from dataplane.node.sessions.interface import Waiting
from dataplane.node.sessions.staged_columns import StagedColumns
from dataplane.node.shards.needed_shards import NeededShards
from dataplane.stream.requests import Succeeded
from dataplane.table import answers
from dataplane.table import requests as r
from dataplane.table.table import TableRows
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm
from dataplane.wire import shard_messages as sm

TableRequest: TypeAlias = rm.AskTable | rm.ListTables

_Asked: TypeAlias = tuple[str | int, ...]
"""The values of a request for ready rows."""

MAX_TABLES = 4096

_DROPPED = 4096  # the most names of dropped tables whose next row number is remembered
TABLES = 50
"""The most tables whose statistics are in one message."""


class LocalTables:
    """All tables of a node."""

    def __init__(self, node: bytes, needed: NeededShards) -> None:
        self.node = node
        self.needed = needed
        self.thinned = needed.thinned
        self._by_name: dict[str, TableRows] = {}
        self._change = partial(next, itertools.count(1))
        self._ended: OrderedDict[str, int] = OrderedDict()  # by name, the next number
        self._waiting: dict[str, list[asyncio.Future[set[_Asked]]]] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str) -> TableRows | None:
        return self._by_name.get(name)

    def open(self, name: str) -> TableRows:
        """Return the table with this name; create it if there is none. Raises LimitExceeded."""
        table = self._by_name.get(name)
        if table is None:
            if len(self._by_name) >= MAX_TABLES:
                what = "tables"
                raise LimitExceeded(
                    f"{MAX_TABLES} {what} are there; drop some", what=what, asked=MAX_TABLES + 1, limit=MAX_TABLES
                )
            table = self._by_name[name] = TableRows(name, self._change, self._ended.pop(name, 0))
        return table

    def drop(self, name: str) -> None:
        table = self._by_name.pop(name, None)
        if table is None:
            return
        self.thinned(table.drop())
        self._ended[name] = table.next
        while len(self._ended) > _DROPPED:
            self._ended.popitem(last=False)
        self.changed(name)

    def changed(self, name: str) -> None:
        """Wake the clients that wait for rows of this table."""
        unready: set[_Asked] = set()
        for future in self._waiting.pop(name, ()):
            if not future.done():
                future.set_result(unready)

    async def wait(self, name: str) -> set[_Asked]:
        """Wait until the table has changed. Callers that are woken together get the same set. They add requests that
        are not ready to it, so that only one of several equal requests is checked."""
        future: asyncio.Future[set[_Asked]] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, []).append(future)
        try:
            return await future
        finally:
            waiting = self._waiting.get(name, [])
            if future in waiting:  # cancelled: futures of repeated requests must not accumulate
                waiting.remove(future)
                if not waiting:
                    del self._waiting[name]

    def figures(self, after: str | None = None, most: int = MAX_TABLES) -> dict[str, Any]:
        """Statistics by name of the first `most` tables after the name `after`."""
        names = sorted(name for name in self._by_name if after is None or name > after)[:most]
        return {name: figures_of(self._by_name[name]) for name in names}

    def close(self) -> None:
        for name in list(self._by_name):
            self.drop(name)


def figures_of(table: TableRows) -> dict[str, Any]:
    return {
        "rows": len(table),
        "bytes": table.cells.nbytes,
        "columns": list(table.cells.schema),
        "tasks": table.claims.tasks,
    }


class LocalTableClient:
    """The tables as one client uses them, and the columns that it staged."""

    def __init__(self, tables: LocalTables, staged: StagedColumns) -> None:
        self._tables = tables
        self._staged = staged

    def answer(self, request: TableRequest, deadline: Deadline) -> m.Reply | Waiting:
        """The reply, or a function to call and await for it."""
        if isinstance(request, rm.ListTables):
            return m.Figures(request.id, self._tables.figures(request.after, TABLES))
        what = checked(request)
        if isinstance(what, r.Upsert):
            return self.write(request, what, BatchRef.decode(what.ref) if what.ref else None, deadline)
        _check_here(request)
        match what:
            case r.FindReady():
                return self._ready(request, what) or partial(self._ready_later, request, what, deadline)
            case r.DropTable():
                self._tables.drop(request.table)
                return self._reply(request, Succeeded())
            case r.ClearRows() | r.Claim() | r.Release():
                return self._act(request, what)
        found = answers.answer(request.table, self._tables.find(request.table), what)
        assert found is not None, "it is no question of what is ready"
        return self._reply(request, found)

    def leave(self) -> None:
        """Do nothing, since a client owns nothing here."""

    def _reply(self, request: rm.AskTable, result: Any) -> m.Reply:
        return rm.TableAnswer(request.id, self._tables.node, result)

    def _act(self, request: rm.AskTable, what: r.ClearRows | r.Claim | r.Release) -> m.Reply:
        table = self._tables.find(request.table)
        if table is None:
            return self._reply(request, answers.given(None) if isinstance(what, r.Claim) else Succeeded())
        result, over = answers.act(table, what)
        self._tables.thinned(over)
        if isinstance(what, r.Release) or (isinstance(what, r.Claim) and what.claim_id):
            self._tables.changed(request.table)
        return self._reply(request, result)

    # writing

    def write(self, request: rm.AskTable, what: r.Upsert, ref: BatchRef | None, deadline: Deadline) -> m.Reply:
        """Write the rows of `what`, without waiting. The columns are `ref`; `what.ref` is ignored. An error leaves
        everything unchanged."""
        _check_here(request)
        answers.check_write(what, ref)
        new = self._tables.find(request.table) is None
        if not what.keys:
            answers.there(request.table, self._tables.find(request.table))
        table = self._tables.open(request.table)
        kept = False
        try:
            if ref is not None:
                self._tables.needed.keep(ref, sys.intern(f"table {request.table}"))
                kept = True
            numbers, over = answers.write(table, what, ref)
        except BaseException:
            if ref is not None and kept:
                self._tables.needed.forget(ref)
            if new:
                self._tables.drop(request.table)
            raise
        if ref is not None:
            self._staged.kept(request.staged, ref)
        self._tables.thinned(over)
        self._tables.changed(request.table)
        return self._reply(request, answers.wrote(table, what, numbers))

    # claiming

    def _ready(self, request: rm.AskTable, what: r.FindReady) -> m.Reply | None:
        """The ready rows; None if they are too few."""
        found = answers.answer(request.table, self._tables.find(request.table), what)
        return None if found is None else self._reply(request, found)

    async def _ready_later(self, request: rm.AskTable, what: r.FindReady, deadline: Deadline) -> m.Reply:
        asked: _Asked = (*what.columns, what.task, what.claim_id, what.least, what.after)
        unready: set[_Asked] = set()
        try:
            async with asyncio.timeout(deadline.remaining_s):
                while True:
                    reply = None if asked in unready else self._ready(request, what)
                    if reply is not None:
                        return reply
                    unready.add(asked)
                    unready = await self._tables.wait(request.table)
        except TimeoutError:
            raise not_ready(request.table, what, deadline) from None


def checked(request: rm.AskTable) -> r.FromClient:
    """The decoded request, checked against the limits of tables, and with an empty client name. Raises LimitExceeded,
    ProtocolMismatch."""
    _check_name(request.table)
    asked = request.asked
    match asked:
        case r.Upsert() | r.Read() | r.LookRows():
            checks.bound("rows of a call", rm.MAX_ROWS, len(asked.keys) or len(asked.rows))
        case r.Number():
            checks.bound("rows of a call", rm.MAX_ROWS, len(asked.keys))
        case r.Claim() | r.FindClaim():
            _check_name(asked.task)
            _check_name(asked.claim_id or "-")
    if isinstance(asked, r.Upsert):
        checks.bound("characters of a key", sm.MAX_SCOPE, max(map(len, asked.keys), default=0))
    return msgspec.structs.replace(asked, client="", sequence=0) if asked.client or asked.sequence else asked


def _check_name(name: str) -> None:
    """Raise LimitExceeded or ProtocolMismatch for an invalid name of a table, task or claim."""
    checks.bound("the name of a table, task or claim", sm.MAX_SCOPE, len(name))
    if not name:
        raise ProtocolMismatch("a table, task or claim without a name")


def _check_here(request: rm.AskTable) -> None:
    """Raise Misuse if the table has to be durable, since tables of this module end with the process."""
    if request.durable:
        raise Misuse(
            f"the table {request.table!r} can't be durable: the node has no data directory; start it with"
            " --data-dir DIR or NodeConfig(data_dir=DIR)"
        )


def not_ready(table: str, asked: r.FindReady, deadline: Deadline) -> NotReady:
    """The error of a client that waited for rows until its deadline."""
    waited_s = deadline.waited_s
    unclaimed = f" and unclaimed by task {asked.task!r}" if asked.task else ""
    rows = "no row" if asked.least == 1 else f"fewer than {asked.least} rows"
    has = f"{rows} of table {table!r} had {', '.join(map(repr, asked.columns)) or 'no column'}"
    what = f"{has}{unclaimed}, after {waited_s:.2f} s"
    return NotReady(what, stream=table, task=asked.task, waited_s=waited_s)
