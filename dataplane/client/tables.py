"""A client's interface to a table: rows by key, which stay until they are cleared and can be read repeatedly.

Invariants: columns of a failed write are freed, also if this process dies meanwhile. A call whose answer was lost can
be repeated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import numpy as np
from msgspec.structs import replace

from dataplane.batch.concat import concat
from dataplane.batch.field import Field
from dataplane.batch.put_options import Narrow
from dataplane.batch.ref import BatchRef
from dataplane.batch.small_columns import SmallColumns
from dataplane.client import arguments
from dataplane.client.connection import Connection
from dataplane.client.table_rows import (
    Flags,
    Index,
    Named,
    TableSlice,
    by_number,
    joined,
    keys_of_rows,
    ranges,
    rows_named,
    rows_of,
    tags_of,
    widened,
)
from dataplane.client.writer import ShardWriter
from dataplane.clock import Deadline
from dataplane.errors import LimitExceeded, Misuse, ProtocolMismatch, SchemaMismatch
from dataplane.stream.requests import StreamResult, Succeeded
from dataplane.table import requests as r
from dataplane.wire import row_messages as rm

R = TypeVar("R", bound=StreamResult)

TIMEOUT_S = 60.0
"""The default timeout of a write, in seconds."""

_REF_ROWS = 1 << 14  # the most rows of one request to read


class AsyncTable:
    """A table of the cluster, for asyncio. Created by `plane.table` without a message. See `dataplane.Table`."""

    def __init__(self, connection: Connection, writer: ShardWriter, name: str, *, durable: bool = False) -> None:
        self.name = name
        self._durable = durable
        self._connection = connection
        self._writer = writer
        self._home = b""

    def __repr__(self) -> str:
        return f"<table {self.name!r}>"

    # writing

    async def upsert(
        self,
        rows: Named,
        columns: Any = None,
        *,
        tags: Sequence[Mapping[str, Any]] | None = None,
        dedupe: Collection[str] = (),
        stored: Callable[[BatchRef], object] | None = None,
        timeout: float = TIMEOUT_S,
        narrow: Narrow = False,
    ) -> Index:
        """Write columns and tags to rows. Returns the rows' numbers. Missing rows are created, and must be named by
        keys. In existing rows, columns of the same name are replaced, and the old ones freed.

        columns: as for `plane.put`, or a reference to rows that were put, which the table then owns. In a mapping, a
            value may be a reference to one column of a table; its memory is kept until no row refers to it. None: only
            tags are written.
        tags: a mapping for each row, of values that MessagePack holds. A tag replaces the row's tag of the same name.
        dedupe: names of columns whose equal rows are stored once.
        stored: a function that is called with a reference to the columns once the table owns them.
        timeout: seconds to wait for room.
        narrow: as for `plane.put`. The dtype is the narrowest for the integers of this write.

        A write of more than 65,536 rows has several steps. Raises SchemaMismatch (the values are no columns, or differ
        from the table's), Misuse, Backpressure, LimitExceeded, Freed (a reference is to freed rows), PeerUnavailable,
        OutcomeUnknown (no answer came: repeat the write).
        """
        replies = await self._write(rows, columns, tags, timeout, r.RowNumbers, dedupe, stored, narrow)
        return joined([reply.rows for reply in replies])

    async def upsert_and_look(
        self,
        rows: Named,
        columns: Any = None,
        *,
        tags: Sequence[Mapping[str, Any]] | None = None,
        dedupe: Collection[str] = (),
        stored: Callable[[BatchRef], object] | None = None,
        timeout: float = TIMEOUT_S,
        narrow: Narrow = False,
    ) -> tuple[TableSlice, list[str]]:
        """Write as `upsert`. Returns the rows as a later `look` at all columns of the table would, and the names of the
        columns. Takes one message instead of three (upsert, schema, look)."""
        return _seen(await self._write(rows, columns, tags, timeout, r.Looked, dedupe, stored, narrow))

    async def _write(
        self,
        rows: Named,
        columns: Any,
        tags: Sequence[Mapping[str, Any]] | None,
        timeout: float,
        kind: type[R],
        dedupe: Collection[str],
        stored: Callable[[BatchRef], object] | None,
        narrow: Narrow,
    ) -> list[R]:
        """Write in as many steps as needed. Returns the answers."""
        deadline = Deadline.after(arguments.seconds(timeout))
        keys, numbers = rows_named(rows)
        count = len(keys) or len(numbers)
        tagged = tags_of(tags, count)
        planned, (columns, ref) = None, _parted(columns)
        if ref is not None:
            arguments.check_rows(len(ref), count)
            if ref.is_sliced():
                raise Misuse("a table has whole rows: write them, and slice what is read")
        if columns is not None:
            columns = await self._writer.optioned(columns, narrow)
            planned = await self._writer.plan(columns, dedupe)
            arguments.check_rows(planned.rows, count)
        if not count:
            return []
        parts = ranges(count, keys, tagged)
        carried = self._writer.inline(planned) if planned and len(parts) == 1 and stored is None else None
        if carried is not None:
            write = written_as(keys, numbers, ref, tagged, kind)
            reply = await self.ask(write, kind, deadline.remaining_s, columns=carried)
            return [reply, *await self._rest(reply, keys, numbers)]
        found: list[R] = []
        staging: Any = self._writer.staged(planned, deadline.remaining_s) if planned else nullcontext(("", None))
        async with staging as (staged, written):
            if written is not None:
                ref = written if ref is None else written.union(ref)
            for start, stop in parts:
                part = None if ref is None else ref[start:stop]
                write = written_as(keys[start:stop], numbers[start:stop], part, tagged[start:stop], kind)
                reply = await self.ask(write, kind, staged=staged if stop == count else "")
                found += [reply, *await self._rest(reply, keys[start:stop], numbers[start:stop])]
        if stored is not None and ref is not None:
            stored(ref)
        return found

    async def _rest(self, reply: R, keys: list[str], numbers: Index) -> list[R]:
        """The answers about those of these rows that the reply to their write had no room for."""
        if not isinstance(reply, r.Looked) or not reply.more:
            return []
        first, names = len(reply.rows), reply.columns
        more = await self._look(keys[first:], numbers[first:], columns=names)
        return [cast("R", replace(each, columns=names)) for each in more]

    async def _put_row(
        self, key: str, row: SmallColumns, references: Mapping[str, BatchRef], tags: Any = None
    ) -> tuple[TableSlice, list[str]]:
        """Write a row as `upsert_and_look`, whose small columns are laid out already (`batch.small_columns`). Takes one
        message. references: by name, further columns that are in a table already, each of one row."""
        refs = [ref.rename({ref.columns[0]: name}) for name, ref in references.items()]
        inline = rm.Inline(row.payload, row.layout, [nbytes for *_, nbytes in row.columns])
        ref = functools.reduce(BatchRef.union, refs) if refs else None
        write = written_as(keys_of_rows([key]), np.empty(0, np.int64), ref, tags_of(tags, 1), r.Looked)
        return _seen([await self.ask(write, r.Looked, TIMEOUT_S, columns=inline)])

    async def ask(
        self,
        asked: r.FromClient,
        kind: type[R],
        timeout_s: float = 0.0,
        *,
        staged: str = "",
        columns: rm.Inline | None = None,
    ) -> R:
        """Send a request to the table's partition. Returns the answer. Raises the partition's error, and
        ProtocolMismatch if the answer's type is not `kind`."""
        durable = self._durable and isinstance(asked, r.Upsert | r.FindReady)  # only these create a table
        number = self._connection.next_id()
        request = rm.AskTable(number, self.name, self._home, asked, timeout_s, staged, durable, columns)
        answer = await self._connection.request(request, rm.TableAnswer, timeout_s)
        self._home = answer.home
        if not isinstance(answer.result, kind):
            raise ProtocolMismatch(f"a table answered {type(answer.result).__name__} where {kind.__name__} was due")
        return answer.result

    async def numbers(self, keys: Sequence[str], *, create: bool = False) -> Index:
        """Return the numbers of the rows with these keys. `create`: whether missing rows are created, without columns.
        Otherwise, an unknown key raises Misuse."""
        named = keys_of_rows(keys)
        found = []
        for start, stop in ranges(len(named), named, []):
            some = named[start:stop]
            found.append((await self.ask(r.Upsert(keys=some) if create else r.Number(keys=some), r.RowNumbers)).rows)
        return joined(found)

    # reading

    async def read(self, rows: Named, columns: Sequence[str] | None = None) -> BatchRef:
        """Return a reference to these columns of these rows, in this order; without `columns`, to all columns that
        every row has. If a value is replaced or cleared before the reference is read, reading it raises `Freed`.
        Raises Misuse for a row that does not exist or lacks a column, or if the rows have no column in common."""
        keys, numbers = rows_named(rows)
        names = None if columns is None else arguments.names("columns", columns)
        count = len(keys) or len(numbers)
        return await self._read(keys, numbers, names, 0, count)

    async def _read(self, keys: list[str], numbers: Index, names: list[str] | None, start: int, stop: int) -> BatchRef:
        try:
            if stop - start <= _REF_ROWS:
                asked = r.Read(keys=keys[start:stop], rows=numbers[start:stop], columns=names)
                return BatchRef.decode((await self.ask(asked, r.Referred)).ref)
        except LimitExceeded:
            if stop - start < 2:
                raise
        middle = (start + stop) // 2
        parts = [await self._read(keys, numbers, names, *part) for part in ((start, middle), (middle, stop))]
        both = [name for name in parts[0].columns if all(name in part.columns for part in parts)]
        if not both:
            raise Misuse(f"these rows of the table {self.name!r} have no column that all of them have")
        return concat([part.select(*both) for part in parts])

    async def schema(self) -> dict[str, Field]:
        """The field (kind, dtype and shape) of each column, by name."""
        reply = await self.ask(r.DescribeColumns(), r.Referred)
        return dict(BatchRef.decode(reply.ref).schema) if reply.ref else {}

    async def keys(self, numbers: Index | Sequence[int]) -> list[str]:
        """The keys of the rows with these numbers. Raises Misuse for a row that does not exist."""
        return (await self.look(by_number(numbers), tags=False)).keys

    async def look(
        self,
        rows: Named | None = None,
        *,
        columns: Sequence[str] = (),
        tags: bool = True,
        since: int = 0,
        missing_ok: bool = False,
    ) -> TableSlice:
        """Return the keys and tags of these rows, and which of `columns` each row has. Without `rows`, of all rows in
        the order of arrival.

        tags: whether to return tags. since: the `changes` of an earlier look. If the table has not changed since then,
        no rows are returned. missing_ok: whether rows that do not exist are left out; otherwise they raise Misuse.
        """
        names, after_change = arguments.names("columns", columns), arguments.whole("since", since)
        how: dict[str, Any] = {"columns": names, "tags": bool(tags)}
        replies: list[r.Looked] = []
        if rows is not None:
            keys, numbers = rows_named(rows)
            replies = await self._look(keys, numbers, since=after_change, missing_ok=bool(missing_ok), **how)
        while rows is None and (not replies or replies[-1].more):
            after = int(replies[-1].rows[-1]) if replies else -1
            asked = r.LookRows(all=True, after=after, since=0 if replies else after_change, **how)
            replies.append(await self.ask(asked, r.Looked))
        return rows_of(replies, len(names))

    async def _look(self, keys: list[str], numbers: Index, *, since: int = 0, **how: Any) -> list[r.Looked]:
        """Look at these rows in as many requests as needed. Returns the answers."""
        found: list[r.Looked] = []
        pending = ranges(len(keys) or len(numbers), keys, [])
        while pending:
            start, stop = pending.pop(0)
            asked = r.LookRows(keys=keys[start:stop], rows=numbers[start:stop], since=since if not found else 0, **how)
            try:
                found.append(await self.ask(asked, r.Looked))
            except LimitExceeded:  # the answer is too large for a message
                if stop - start < 2:
                    raise
                middle = (start + stop) // 2
                pending = [(start, middle), (middle, stop), *pending]
            if since and found and found[0].changes == since:
                break  # no row has changed
        return found

    # claiming

    async def ready(
        self,
        columns: Sequence[str],
        *,
        task: str | None = None,
        claim_id: str | None = None,
        least: int = 1,
        timeout: float = 0.0,
    ) -> Index:
        """Wait until at least `least` rows are ready. Returns the numbers of all ready rows in the order of arrival. A
        row is ready if it has all of `columns` and is not claimed by `task`.

        claim_id: if the task has a claim with this id, its rows are returned at once.
        timeout: seconds to wait, without polling. Raises NotReady at the deadline.
        """
        names, wait_s = arguments.names("columns", columns), arguments.seconds(timeout)
        found: list[Index] = []
        more, after = True, -1
        while more:
            asked = r.FindReady(
                columns=names,
                task="" if task is None else arguments.text("a task", task),
                claim_id="" if claim_id is None else arguments.text("a claim", claim_id),
                least=arguments.whole("least", least) if not found else 0,
                after=after,
            )
            reply = await self.ask(asked, r.RowNumbers, wait_s)
            found.append(reply.rows)
            more = reply.more
            after = int(found[-1][-1]) if more else after
        return joined(found)

    async def claim(
        self,
        task: str,
        numbers: Index | Sequence[int],
        *,
        give: Index | Sequence[int] | None = None,
        claim_id: str | None = None,
    ) -> Index | None:
        """Mark these rows as claimed by the task, all or none. Returns the claim's rows, or None if a row was claimed
        meanwhile or does not exist. Then choose again.

        claim_id: a name for the claim. A call with the id of an earlier claim claims nothing, and returns the rows of
            that claim. So ranks that must see the same rows use the same id, and a call without an answer can be
            repeated.
        give: the rows that this claim returns; None: the claimed rows.
        """
        claimed = by_number(numbers)
        asked = r.Claim(
            task=arguments.text("a task", task),
            rows=claimed,
            give=claimed if give is None else by_number(give),
            claim_id="" if claim_id is None else arguments.text("a claim", claim_id),
        )
        reply = await self.ask(asked, r.ClaimedRows)
        return reply.rows if reply.granted else None

    async def find_claim(self, task: str, claim_id: str) -> Index | None:
        """The rows that the task's claim with this id returned; None if there is no such claim."""
        asked = r.FindClaim(task=arguments.text("a task", task), claim_id=arguments.text("a claim", claim_id))
        reply = await self.ask(asked, r.ClaimedRows)
        return reply.rows if reply.granted else None

    async def release(self, task: str | None = None, numbers: Index | Sequence[int] | None = None) -> None:
        """Undo claims. The ids of claims that returned these rows can be used again.

        task: the task whose claims are undone; None: all tasks.
        numbers: the rows whose claims are undone; None: all rows.
        """
        named = np.empty(0, np.int64) if numbers is None else by_number(numbers)
        of = "" if task is None else arguments.text("a task", task)
        await self.ask(r.Release(task=of, rows=named, all=numbers is None), Succeeded)

    async def claimed(self, task: str, numbers: Index | Sequence[int] | None = None) -> Flags:
        """Return for each of these rows whether the task has claimed it; without `numbers`, for all rows in the order
        of arrival. Raises Misuse for a row that does not exist."""
        named = np.empty(0, np.int64) if numbers is None else by_number(numbers)
        flags: list[bytes] = []
        more, after = True, -1
        while more:
            asked = r.Claimed(task=arguments.text("a task", task), rows=named, all=numbers is None, after=after)
            reply = await self.ask(asked, r.Flagged)
            flags.append(reply.flags)
            more, after = reply.more, reply.last
        return np.frombuffer(b"".join(flags), np.bool_)

    # removing

    async def clear(self, rows: Named) -> None:
        """Remove these rows with their columns, tags and numbers. Rows that do not exist are ignored."""
        keys, numbers = rows_named(rows)
        for start, stop in ranges(len(keys) or len(numbers), keys, []):
            await self.ask(r.ClearRows(keys=keys[start:stop], rows=numbers[start:stop]), Succeeded)

    async def drop(self) -> None:
        """Remove the table with all rows and claims. A later write creates a new table of the same name."""
        await self.ask(r.DropTable(), Succeeded)


def written_as(
    keys: list[str], numbers: Index, ref: BatchRef | None, tags: list[dict[str, Any]], kind: type[StreamResult]
) -> r.Upsert:
    """The request of a write. `kind`: the type of its answer."""
    encoded = b"" if ref is None else ref.encode()
    return r.Upsert(keys=keys, rows=numbers, ref=encoded, tags=tags, look=kind is r.Looked)


def _seen(replies: list[r.Looked]) -> tuple[TableSlice, list[str]]:
    """The written rows, and the names of all columns."""
    if not replies:
        return TableSlice(np.empty(0, np.int64), [], [], np.zeros((0, 0), np.bool_), 0), []
    names = replies[-1].columns
    seen = [replace(reply, have=widened(reply, len(names))) for reply in replies]
    return rows_of(seen, len(names)), names


def _parted(columns: Any) -> tuple[Any, BatchRef | None]:
    """The columns to store, and a reference to columns that are stored already, with their names in this table; None
    for none. Raises SchemaMismatch."""
    if isinstance(columns, BatchRef):
        return None, columns
    refs: list[BatchRef] = []
    for name, values in columns.items() if isinstance(columns, Mapping) else ():
        if isinstance(values, BatchRef):
            if len(values.columns) != 1:
                found = f"a reference to {len(values.columns)} columns"
                raise SchemaMismatch(
                    f"column {name!r} is {found}: select one", column=name, expected="one", found=found
                )
            refs.append(values.rename({values.columns[0]: name}))
    if not refs:
        return columns, None
    named = {name: values for name, values in columns.items() if not isinstance(values, BatchRef)}
    return named or None, functools.reduce(BatchRef.union, refs)
