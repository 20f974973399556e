"""The tables of a node, by name, and what a client asks of them.

A table is made by the first write, and goes when it is dropped: a name that nobody has written to has no rows. Its
numbers go on where those of the last table of its name ended, so that a number which somebody kept means no other row.

What always holds: what a table's rows need is there, and what none needs is freed (`node.shards.needed`); what a client
staged and did not write goes with it; who waits is told as soon as there is what it waits for, or that its time is
over.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from functools import partial
from typing import Any

from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.errors import LimitExceeded, Misuse, NotReady
from dataplane.node.shards.needed import NeededShards
from dataplane.node.streams.sessions import Waiting
from dataplane.node.streams.staged import Staged
from dataplane.node.tables.asking import TableRequest, asked, check_name, replied
from dataplane.table import answers
from dataplane.table import requests as r
from dataplane.table.table import Table
from dataplane.wire import messages as m

MAX_TABLES = 4096

_DROPPED = 4096  # names whose numbers are remembered
TABLES = 50
"""Tables whose figures one message has."""


class Tables:
    """All tables of a node."""

    def __init__(self, node: bytes, needed: NeededShards) -> None:
        self.node = node
        self.needed = needed
        self.thinned = needed.thinned
        self._by_name: dict[str, Table] = {}
        self._change = partial(next, itertools.count(1))
        self._ended: OrderedDict[str, int] = OrderedDict()  # by name, the next number
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def find(self, name: str) -> Table | None:
        """The table of this name, if it is there."""
        return self._by_name.get(name)

    def open(self, name: str) -> Table:
        """The table of this name, made if it is not there. Raises LimitExceeded."""
        table = self._by_name.get(name)
        if table is None:
            if len(self._by_name) >= MAX_TABLES:
                what = "tables"
                raise LimitExceeded(
                    f"{MAX_TABLES} {what} are there; drop some", what=what, asked=MAX_TABLES + 1, limit=MAX_TABLES
                )
            table = self._by_name[name] = Table(name, self._change, self._ended.pop(name, 0))
        return table

    def drop(self, name: str) -> None:
        """Free all of a table, if it is there."""
        table = self._by_name.pop(name, None)
        if table is None:
            return
        self.thinned(table.drop())
        self._ended[name] = table.next
        while len(self._ended) > _DROPPED:
            self._ended.popitem(last=False)
        self.changed(name)

    def changed(self, name: str) -> None:
        """Who waits for rows of this table looks again."""
        for future in self._waiting.pop(name, ()):
            if not future.done():
                future.set_result(None)

    async def wait(self, name: str) -> None:
        """Wait until the table has changed."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, []).append(future)
        try:
            await future
        finally:
            waiting = self._waiting.get(name, [])
            if future in waiting:  # cancelled: who asks again and again must not be remembered each time
                waiting.remove(future)
                if not waiting:
                    del self._waiting[name]

    def figures(self, after: str | None = None, most: int = MAX_TABLES) -> dict[str, Any]:
        """The figures of the first tables by name, of those after this name; at most so many."""
        names = sorted(name for name in self._by_name if after is None or name > after)[:most]
        return {name: figures_of(self._by_name[name]) for name in names}

    def close(self) -> None:
        """The node stops."""
        for name in list(self._by_name):
            self.drop(name)


def figures_of(table: Table) -> dict[str, Any]:
    """What is counted of a table."""
    return {"rows": len(table), "bytes": table.nbytes, "columns": list(table.schema), "tasks": table.tasks}


class Tabling:
    """The tables as one client uses them, with what it has staged."""

    def __init__(self, tables: Tables, staged: Staged) -> None:
        self._tables = tables
        self._staged = staged

    def answer(self, request: TableRequest, deadline: Deadline) -> m.Reply | Waiting:
        """The reply, or what has to be called and awaited for it."""
        if isinstance(request, m.Tables):
            return m.Figures(request.id, self._tables.figures(request.after, TABLES))
        check_name(request.table)
        if isinstance(request, m.WriteRows):
            return self.write(request, BatchRef.decode(request.ref) if request.ref else None, deadline)
        _check_here(request)
        if isinstance(request, m.ReadyRows):
            ready = asked(request)
            return self._ready(request, ready) or partial(self._ready_later, request, ready, deadline)
        what = asked(request)
        match what:
            case r.Write():
                return self._write(request, what, None)
            case r.Drop():
                self._tables.drop(request.table)
            case r.Clear() | r.Take() | r.Untake():
                return self._act(request, what)
            case _:
                assert isinstance(what, r.Question), "clients ask nothing else"
                found = answers.answer(request.table, self._tables.find(request.table), what)
                assert found is not None, "it is no question of what is ready"
                return self._reply(request, found)
        return m.Done(request.id)

    def leave(self) -> None:
        """The client has gone. Nothing here is its own."""

    def _reply(self, request: Any, result: r.AnyResult) -> m.Reply:
        return replied(request.id, self._tables.node, result)

    def _act(self, request: Any, what: r.Clear | r.Take | r.Untake) -> m.Reply:
        table = self._tables.find(request.table)
        if table is None:
            return self._reply(request, answers.given(None)) if isinstance(what, r.Take) else m.Done(request.id)
        result, over = answers.act(table, what)
        self._tables.thinned(over)
        if isinstance(what, r.Untake) or (isinstance(what, r.Take) and what.claim):
            self._tables.changed(request.table)
        return self._reply(request, result)

    # writing

    def write(self, request: m.WriteRows, ref: BatchRef | None, deadline: Deadline) -> m.Reply:
        """Write the rows with these columns, whatever the request's `ref` is; at once, whatever the deadline."""
        check_name(request.table)
        _check_here(request)
        return self._write(request, asked(request), ref)

    def _write(self, request: Any, what: r.Write, ref: BatchRef | None) -> m.Reply:
        answers.check_write(what, ref)
        if not what.keys:
            answers.there(request.table, self._tables.find(request.table))
        table = self._tables.open(request.table)
        if ref is not None:
            self._tables.needed.keep(ref)
        try:
            numbers, over = answers.write(table, what, ref)
        except BaseException:
            if ref is not None:
                self._tables.needed.forget(ref)
            raise
        if ref is not None:
            self._staged.kept(request.staged, ref)
        self._tables.thinned(over)
        self._tables.changed(request.table)
        return self._reply(request, answers.wrote(table, what, numbers))

    # taking

    def _ready(self, request: m.ReadyRows, what: r.Ready) -> m.Reply | None:
        """What is ready; None where that is too little."""
        found = answers.answer(request.table, self._tables.find(request.table), what)
        return None if found is None else self._reply(request, found)

    async def _ready_later(self, request: m.ReadyRows, what: r.Ready, deadline: Deadline) -> m.Reply:
        try:
            async with asyncio.timeout(deadline.remaining_s):
                while (reply := self._ready(request, what)) is None:
                    await self._tables.wait(request.table)
        except TimeoutError:
            raise not_ready(request, deadline) from None
        return reply


def _check_here(request: Any) -> None:
    """Raises Misuse for a table that is to be durable: the tables here end with the process."""
    if getattr(request, "durable", False):
        raise Misuse(f"the table {request.table!r} can't be durable here: start the node with --data-dir DIR")


def not_ready(request: m.ReadyRows, deadline: Deadline) -> NotReady:
    """Who waited until its deadline is told so."""
    what = f"fewer than {request.least} rows of table {request.table!r} became ready"
    return NotReady(
        f"{what} in {deadline.waited_s:.1f} s",
        stream=request.table,
        task=request.task,
        waited_s=deadline.waited_s,
    )
