"""The tables of a node, by name, and what a client asks of them.

A table is made by the first write, and goes when it is dropped: a name that nobody has written to has no rows. Its
numbers go on where those of the last table of its name ended, so that a number which somebody kept means no other row.

What always holds: what a table's rows need is there, and what none needs is freed (`node.streams.homes`); what a client
staged and did not write goes with it; who waits is told as soon as there is what it waits for, or that its time is
over.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np

from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.errors import LimitExceeded, Misuse, NotReady, ProtocolMismatch
from dataplane.node.streams import packed
from dataplane.node.streams.homes import Homes
from dataplane.node.streams.streaming import Streaming, Waiting
from dataplane.stream.table import Index, Over, Table
from dataplane.wire import messages as m

MAX_TABLES = 4096

_DROPPED = 4096  # names whose numbers are remembered
TABLES = 50
"""Tables whose figures one message has."""

_PAGE = 1 << 15  # rows that one message tells of
_NUMBERS = 1 << 18  # numbers of rows that one message has
_PAGE_BYTES = m.MAX_FRAME // 4  # of tags in one message; keys and flags take no more

TableRequest = (
    m.WriteRows
    | m.ReadRows
    | m.DescribeTable
    | m.LookAtRows
    | m.NumberRows
    | m.ReadyRows
    | m.TakeRows
    | m.UntakeRows
    | m.TakenRows
    | m.ClearRows
    | m.DropTable
    | m.Tables
)

_encoder = msgspec.msgpack.Encoder()


class Tables:
    """All tables of a node."""

    def __init__(self, node: bytes, homes: Homes) -> None:
        self.node = node
        self.homes = homes
        self.thinned: Callable[[list[Over]], None] = homes.thinned
        """Called with what is not needed any more."""
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

    def drop_all(self) -> None:
        """Free all tables."""
        for name in list(self._by_name):
            self.drop(name)

    def changed(self, name: str) -> None:
        """Who waits for rows of this table looks again."""
        for future in self._waiting.pop(name, ()):
            if not future.done():
                future.set_result(None)

    def wake(self) -> None:
        """Who waits for anything looks again."""
        for name in list(self._waiting):
            self.changed(name)

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
        return {name: _figures(self._by_name[name]) for name in names}

    def close(self) -> None:
        """The node stops."""
        for name in list(self._by_name):
            self.drop(name)


def _figures(table: Table) -> dict[str, Any]:
    return {"rows": len(table), "bytes": table.nbytes, "columns": list(table.schema), "tasks": table.tasks}


class Tabling:
    """The tables as one client uses them. `streams` knows what it has staged."""

    def __init__(self, tables: Tables, streams: Streaming, check: Callable[[str], None] = lambda name: None) -> None:
        """`check` is called with the name of a table that is not here while somebody waits for it; it may raise."""
        self._tables = tables
        self._streams = streams
        self._check = check

    def answer(self, request: TableRequest, deadline: Deadline) -> m.Reply | Waiting:
        """The reply, or what has to be called and awaited for it."""
        if isinstance(request, m.Tables):
            return m.Figures(request.id, self._tables.figures(request.after, TABLES))
        _check_name(request.table)
        match request:
            case m.WriteRows():
                return self._write(request)
            case m.NumberRows():
                return self._number(request)
            case m.ReadyRows():
                return self._ready(request) or partial(self._ready_later, request, deadline)
            case m.TakeRows():
                return self._take(request)
            case m.DropTable():
                self._tables.drop(request.table)
                return m.Done(request.id)
        table = self._tables.find(request.table)
        match request:
            case m.ReadRows():
                return self._read(request, self._there(request.table, table))
            case m.LookAtRows():
                return self._look(request, table)
            case m.TakenRows():
                return self._taken(request, table)
            case m.DescribeTable():
                described = None if table is None else table.described()
                return m.Referred(request.id, self._tables.node, b"" if described is None else described.encode())
            case m.UntakeRows() if table is not None:
                numbers = None if request.all else packed.int64("rows", request.rows)
                table.untake(request.task or None, numbers)
                self._tables.changed(request.table)
            case m.ClearRows() if table is not None:
                rows = _rows(request.keys, request.rows)
                self._tables.thinned(table.cleared(rows))
        return m.Done(request.id)

    def _there(self, name: str, table: Table | None) -> Table:
        if table is None:
            raise Misuse(f"there is no table {name!r}: nothing was written to it yet, or it was dropped")
        return table

    def _numbered(self, request: Any, numbers: Index) -> m.Numbered:
        told = numbers[:_NUMBERS]
        return m.Numbered(request.id, self._tables.node, told.tobytes(), more=len(told) < len(numbers))

    # writing

    def _write(self, request: m.WriteRows) -> m.Reply:
        return self.write(request, BatchRef.decode(request.ref) if request.ref else None)

    def write(self, request: m.WriteRows, ref: BatchRef | None) -> m.Reply:
        """Write the rows with these columns, whatever the request's `ref` is."""
        _check_name(request.table)
        rows = _rows(request.keys, request.rows)
        packed.bound("rows of a write", m.MAX_ROWS, len(rows))
        packed.bound("characters of a key", m.MAX_SCOPE, max(map(len, request.keys), default=0))
        if not all(request.keys):
            raise Misuse("a key is a text of one character or more")
        packed.one_a_row("tags", request.tags, len(rows))
        if ref is not None and len(ref) != len(rows):
            raise ProtocolMismatch(f"{len(ref)} rows of columns for {len(rows)} rows")
        if isinstance(rows, np.ndarray):
            self._there(request.table, self._tables.find(request.table))
        table = self._tables.open(request.table)
        sizes = self._tag_bytes(table, rows, request.tags)
        if ref is not None:
            self._tables.homes.keep(ref)
        try:
            numbers, over = table.write(rows, ref, request.tags, sizes, tuple(request.held))
        except BaseException:
            if ref is not None:
                self._tables.homes.forget(ref)
            raise
        if ref is not None:
            self._streams.kept(request.staged, ref)
        self._tables.thinned(over)
        self._tables.changed(request.table)
        return self._seen(request, table, numbers) if request.look else self._numbered(request, numbers)

    def _seen(self, request: m.WriteRows, table: Table, numbers: Index) -> m.Reply:
        """What is known of these rows, which are of one write, and what columns there are."""
        names = list(table.schema)
        seen = table.look(numbers, names)
        have = np.packbits(seen.have, axis=1).tobytes() if names else b""
        return m.Looked(
            request.id, self._tables.node, table.changes, numbers.tobytes(), seen.keys, seen.tags, have, False, names
        )

    def _tag_bytes(self, table: Table, rows: Any, tags: list[dict[str, Any]]) -> Index:
        """How large these tags are. Raises LimitExceeded where those of a row come to be too many."""
        if not tags:
            return packed.NOTHING
        sizes = np.fromiter((len(_encoder.encode(each)) for each in tags), np.int64, len(tags))
        most = int((table.tag_bytes(rows) + sizes).max())
        packed.bound("bytes of the tags of a row", m.MAX_TAG_BYTES, most)
        return sizes

    def _number(self, request: m.NumberRows) -> m.Reply:
        packed.bound("rows of a call", m.MAX_ROWS, len(request.keys))
        table = self._tables.find(request.table)
        if request.create:
            made = m.WriteRows(request.id, request.table, request.home, "", b"", request.keys, b"", [])
            return self._write(made)
        if not request.keys:
            return self._numbered(request, packed.NOTHING)
        return self._numbered(request, self._there(request.table, table).numbers(request.keys))

    # reading

    def _read(self, request: m.ReadRows, table: Table) -> m.Reply:
        rows = _rows(request.keys, request.rows)
        packed.bound("rows of a read", m.MAX_ROWS, len(rows))
        numbers = rows if isinstance(rows, np.ndarray) else table.numbers(rows)
        ref = table.read(numbers, request.columns)
        return m.Referred(request.id, self._tables.node, ref.encode())

    def _look(self, request: m.LookAtRows, table: Table | None) -> m.Reply:
        node = self._tables.node
        if table is None or table.changes == request.since:
            if table is None and not request.all and (request.keys or request.rows):
                self._there(request.table, table)
            return m.Looked(request.id, node, 0 if table is None else table.changes, b"", [], [], b"", more=False)
        if request.all:
            most = max(1, min(_PAGE, _PAGE_BYTES // max(1, len(request.columns) // 8)))
            numbers, more = table.after(request.after, most, _PAGE_BYTES)
        else:
            rows, more = _rows(request.keys, request.rows), False
            packed.bound("rows of a look", m.MAX_ROWS, len(rows))
            numbers = rows if isinstance(rows, np.ndarray) else table.numbers(rows)
        seen = table.look(numbers, request.columns, tags=request.tags)
        have = np.packbits(seen.have, axis=1).tobytes() if request.columns else b""
        return m.Looked(request.id, node, table.changes, numbers.tobytes(), seen.keys, seen.tags, have, more)

    # taking

    def _ready(self, request: m.ReadyRows) -> m.Reply | None:
        """What is ready; None where that is too little."""
        table = self._tables.find(request.table)
        if table is None:
            self._check(request.table)
            return self._numbered(request, packed.NOTHING) if request.least <= 0 else None
        claimed = table.claimed(request.task, request.claim) if request.claim else None
        if claimed is not None:
            return self._numbered(request, claimed)
        numbers = table.ready(request.columns, request.task or None)
        numbers = numbers[np.searchsorted(numbers, request.after, side="right") :]
        return self._numbered(request, numbers) if len(numbers) >= request.least else None

    async def _ready_later(self, request: m.ReadyRows, deadline: Deadline) -> m.Reply:
        try:
            async with asyncio.timeout(deadline.remaining_s):
                while (reply := self._ready(request)) is None:
                    await self._tables.wait(request.table)
        except TimeoutError:
            what = f"fewer than {request.least} rows of table {request.table!r} became ready"
            raise NotReady(
                f"{what} in {deadline.waited_s:.1f} s",
                stream=request.table,
                task=request.task,
                waited_s=deadline.waited_s,
            ) from None
        return reply

    def _take(self, request: m.TakeRows) -> m.Reply:
        _check_name(request.task)
        _check_name(request.claim or "-")
        table, given = self._tables.find(request.table), None
        if request.ask:
            given = None if table is None else table.claimed(request.task, request.claim)
        elif table is not None:
            numbers, give = packed.int64("rows", request.rows), packed.int64("rows", request.give)
            given = table.take(request.task, numbers, give, request.claim)
            if request.claim:
                self._tables.changed(request.table)
        node = self._tables.node
        return m.Given(request.id, node, given is not None, b"" if given is None else given.tobytes())

    def _taken(self, request: m.TakenRows, table: Table | None) -> m.Reply:
        if table is None:
            if not request.all and request.rows:
                self._there(request.table, table)
            return m.Taken(request.id, self._tables.node, b"")
        numbers, more = packed.int64("rows", request.rows), False
        if request.all:
            numbers, more = table.after(request.after, _NUMBERS, 1 << 62)
        flags = table.taken(request.task, numbers)
        last = int(numbers[-1]) if len(numbers) else -1
        return m.Taken(request.id, self._tables.node, flags.tobytes(), last, more)


def _check_name(name: str) -> None:
    packed.bound("the name of a table, task or claim", m.MAX_SCOPE, len(name))
    if not name:
        raise ProtocolMismatch("a table, task or claim without a name")


def _rows(keys: list[str], rows: bytes) -> list[str] | Index:
    """Rows by key or, where there are none, by number."""
    return keys or packed.int64("rows", rows)
