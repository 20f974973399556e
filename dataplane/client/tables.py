"""A table, as a process uses it: rows by key that stay until they are cleared, read as often as one likes.

What always holds: what was written for a call that failed is freed, also when this process dies in between; a call that
is made again, because its answer was lost, does no harm.
"""

from __future__ import annotations

import functools
import itertools
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import numpy as np

from dataplane.batch.concat import concat
from dataplane.batch.field import Field
from dataplane.batch.narrowing import Narrow
from dataplane.batch.ref import BatchRef
from dataplane.client import arguments
from dataplane.client.connection import Connection
from dataplane.client.rownames import Named, by_number, keys_of_rows, rows_named, stretches, tags_of
from dataplane.client.tablerows import Flags, Index, Rows, joined, numbers_of, rows_of, widened
from dataplane.client.writer import Writer
from dataplane.clock import Deadline
from dataplane.errors import DataplaneError, LimitExceeded, Misuse, SchemaMismatch
from dataplane.wire import messages as m

R = TypeVar("R", bound=m.Reply)

TIMEOUT_S = 60.0
"""The deadline, in seconds, of a write that names none."""

_REF_ROWS = 1 << 14  # rows of one read


class AsyncTable:
    """A table of the plane's cluster. Made by `plane.table`, without a message; any number of processes may use it.

    Over several hosts it survives the death of any one of them: what was stored there alone raises `OwnerDied` when it
    is read, and is mended by writing it again. Where every host that had the table dies at once, what is asked of it
    raises `OwnerDied` too, and `plane.table` gives a new one. A durable one is there again when its nodes are started
    again on their data directories.

    Rows are named by their keys, or by their numbers: an array of integers, in the order of arrival, which no other row
    of the table ever gets.
    """

    def __init__(self, connection: Connection, writer: Writer, name: str, *, durable: bool = False) -> None:
        self.name = name
        self._durable = durable
        self._connection = connection
        self._writer = writer
        self._home = b""
        self._staging = f"{m.STAGED}{secrets.token_hex(8)}"
        self._writes = itertools.count(1)

    def __repr__(self) -> str:
        return f"<table {self.name!r}>"

    # writing

    async def write(
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
        """Rows with these columns; their numbers. Rows that are not there are made, which keys can name alone. Of those
        that are, columns they had are replaced, and freed.

        columns: as for `plane.put`, or a reference to what was put, which belongs to the table from then on; in a
            mapping, a column may be a reference to one that is in a table already, which stays until no row of a table
            needs it; None: only keys and tags.
        tags: a mapping a row, of values that MessagePack holds; each takes the place of the tag of its name.
        dedupe: names of columns of which equal rows are stored once.
        stored: called with a reference to the columns, once they are the table's.
        timeout: seconds to wait for room.
        narrow: as for `plane.put`: which integers are stored in the narrowest dtype that holds those of this write.

        More than 65,536 rows are written in several steps. Raises SchemaMismatch (these are no columns, or not those of
        the table), Misuse, Backpressure, LimitExceeded, PeerUnavailable.
        """
        replies = await self._write(rows, columns, tags, timeout, m.Numbered, dedupe, stored, narrow)
        return joined([numbers_of(reply.rows) for reply in replies])

    async def put(
        self,
        rows: Named,
        columns: Any = None,
        *,
        tags: Sequence[Mapping[str, Any]] | None = None,
        dedupe: Collection[str] = (),
        stored: Callable[[BatchRef], object] | None = None,
        timeout: float = TIMEOUT_S,
        narrow: Narrow = False,
    ) -> tuple[Rows, list[str]]:
        """As `write`; what is known of these rows then, of all columns of the table, and which those are. One message,
        where to write, to ask for the schema and to look would be three."""
        replies = await self._write(rows, columns, tags, timeout, m.Looked, dedupe, stored, narrow)
        if not replies:
            return Rows(np.empty(0, np.int64), [], [], np.zeros((0, 0), np.bool_), 0), []
        names = replies[-1].columns
        seen = [msgspec.structs.replace(reply, have=widened(reply, len(names))) for reply in replies]
        return rows_of(seen, len(names)), names

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
        """Write, in as many steps as it takes; what each is answered."""
        deadline = Deadline.after(arguments.seconds(timeout))
        keys, numbers = rows_named(rows)
        count = len(keys) or len(numbers)
        tagged = tags_of(tags, count)
        staged, (columns, ref) = "", _parted(columns)
        if ref is not None:
            _check_rows(len(ref), count)
            if ref.is_sliced():
                raise Misuse("a table has whole rows: write them, and slice what is read")
        if columns is not None:
            if narrow:
                columns = await self._writer.narrowed(columns, narrow)
            planned = await self._writer.plan(columns, dedupe)
            _check_rows(planned.rows, count)
            staged = f"{self._staging}-{next(self._writes)}"
        if not count:
            return []
        parts = stretches(count, keys, tagged)
        carried = self._writer.inline(planned) if staged and len(parts) == 1 and stored is None else None
        if carried is not None:
            write = self._request("", ref, keys, numbers, tagged, look=kind is m.Looked)
            inline = m.WriteInline(self._connection.next_id(), carried, write, deadline.remaining_s)
            return [await self._ask(inline, kind, deadline.remaining_s)]
        try:
            if staged:
                written = await self._writer.write(planned, staged, deadline.remaining_s)
                ref = written if ref is None else written.union(ref)
            found: list[R] = []
            for start, stop in parts:
                request = self._request(
                    staged if stop == count else "",
                    None if ref is None else ref[start:stop],
                    keys[start:stop],
                    numbers[start:stop],
                    tagged[start:stop],
                    look=kind is m.Looked,
                )
                found.append(await self._ask(request, kind))
        except BaseException:
            if staged:
                self._unstage(staged)
            raise
        if stored is not None and ref is not None:
            stored(ref)
        return found

    def _request(
        self,
        staged: str,
        ref: BatchRef | None,
        keys: list[str],
        numbers: Index,
        tags: list[dict[str, Any]],
        *,
        look: bool,
    ) -> m.WriteRows:
        encoded = b"" if ref is None else ref.encode()
        return m.WriteRows(
            self._connection.next_id(),
            self.name,
            self._home,
            staged,
            encoded,
            keys,
            numbers.tobytes(),
            tags,
            look=look,
            durable=self._durable,
        )

    def _unstage(self, staged: str) -> None:
        """What was staged is not written. Says so without waiting; the connection's end says it too."""
        with suppress(DataplaneError):
            self._connection.check()
            self._connection.tell(m.Free(self._connection.next_id(), [], [], staged))

    async def numbers(self, keys: Sequence[str], *, create: bool = False) -> Index:
        """The numbers of the rows of these keys; `create`: rows without columns are made where there are none. Raises
        Misuse for a key that no row has."""
        named = keys_of_rows(keys)
        found = []
        for start, stop in stretches(len(named), named, []):
            asked = m.NumberRows(
                self._connection.next_id(), self.name, self._home, named[start:stop], bool(create), self._durable
            )
            found.append(numbers_of((await self._ask(asked, m.Numbered)).rows))
        return joined(found)

    # reading

    async def read(self, rows: Named, columns: Sequence[str] | None = None) -> BatchRef:
        """A reference to these rows, in this order: of these columns, or of all that each of them has. It means what
        the rows are now; what was replaced or cleared when it comes to be read raises `Freed`. Raises Misuse for a row
        that is not there, or that lacks a column."""
        keys, numbers = rows_named(rows)
        names = None if columns is None else arguments.names("columns", columns)
        count = len(keys) or len(numbers)
        return await self._read(keys, numbers, names, 0, count)

    async def _read(self, keys: list[str], numbers: Index, names: list[str] | None, start: int, stop: int) -> BatchRef:
        """These of the rows, in as many messages as it takes."""
        try:
            if stop - start <= _REF_ROWS:
                asked = m.ReadRows(
                    self._connection.next_id(),
                    self.name,
                    self._home,
                    keys[start:stop],
                    numbers[start:stop].tobytes(),
                    names,
                )
                return BatchRef.decode((await self._ask(asked, m.Referred)).ref)
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
        """What each column is, by name."""
        reply = await self._ask(m.DescribeTable(self._connection.next_id(), self.name, self._home), m.Referred)
        return dict(BatchRef.decode(reply.ref).schema) if reply.ref else {}

    async def keys(self, numbers: Index | Sequence[int]) -> list[str]:
        """The keys of these rows. Raises Misuse for one that is not there."""
        return (await self.look(by_number(numbers), tags=False)).keys

    async def look(
        self, rows: Named | None = None, *, columns: Sequence[str] = (), tags: bool = True, since: int = 0
    ) -> Rows:
        """What is known of these rows, or of all in the order of arrival: keys, tags, and which of these columns they
        have. With `since`, the `changes` of an earlier look, no rows where nothing has changed in the table. Raises
        Misuse for a row that is not there."""
        names = arguments.names("columns", columns)
        keys, numbers = rows_named(rows) if rows is not None else ([], np.empty(0, np.int64))
        steps = stretches(len(keys) or len(numbers), keys, []) if rows is not None else itertools.repeat((0, 0))
        replies: list[m.Looked] = []
        after, since = -1, arguments.whole("since", since)
        for start, stop in steps:
            asked = m.LookAtRows(
                self._connection.next_id(),
                self.name,
                self._home,
                keys[start:stop],
                numbers[start:stop].tobytes(),
                rows is None,
                after,
                names,
                bool(tags),
                since if not replies else 0,
            )
            reply = await self._ask(asked, m.Looked)
            replies.append(reply)
            if rows is None:
                if not reply.more:
                    break
                after = int(numbers_of(reply.rows)[-1])
        return rows_of(replies, len(names))

    # taking

    async def ready(
        self,
        columns: Sequence[str],
        *,
        task: str | None = None,
        claim: str | None = None,
        least: int = 1,
        timeout: float = 0.0,
    ) -> Index:
        """The rows, in the order of arrival, that have all these columns and that the task has not taken, once there
        are `least`. With a claim that was made already, what was given under it, at once.

        timeout: seconds to wait for that many; the node waits, nobody polls. Raises NotReady at the deadline.
        """
        names, wait_s = arguments.names("columns", columns), arguments.seconds(timeout)
        found: list[Index] = []
        more, after = True, -1
        while more:
            asked = m.ReadyRows(
                self._connection.next_id(),
                self.name,
                self._home,
                names,
                "" if task is None else arguments.text("a task", task),
                "" if claim is None else arguments.text("a claim", claim),
                arguments.whole("least", least) if not found else 0,
                after,
                wait_s,
                self._durable,
            )
            reply = await self._ask(asked, m.Numbered, wait_s)
            found.append(numbers_of(reply.rows))
            more = reply.more
            after = int(found[-1][-1]) if more else after
        return joined(found)

    async def take(
        self,
        task: str,
        numbers: Index | Sequence[int],
        *,
        give: Index | Sequence[int] | None = None,
        claim: str | None = None,
    ) -> Index | None:
        """Mark these rows as taken by the task, all or none; their numbers. None where one of them was taken meanwhile
        or has gone: choose again.

        claim: a name for this choice. Who names one that was made already takes nothing, and is given what was given
            then: so ranks that must see the same rows name the same claim, and a call whose answer was lost can be made
            again. give: what is given, if that is not just what is taken.
        """
        taken = by_number(numbers)
        given = taken if give is None else by_number(give)
        request = m.TakeRows(
            self._connection.next_id(),
            self.name,
            self._home,
            arguments.text("a task", task),
            taken.tobytes(),
            given.tobytes(),
            "" if claim is None else arguments.text("a claim", claim),
        )
        reply = await self._ask(request, m.Given)
        return numbers_of(reply.rows) if reply.granted else None

    async def claimed(self, task: str, claim: str) -> Index | None:
        """What was given under this claim of the task; None where nobody has made it."""
        asked = m.TakeRows(
            self._connection.next_id(),
            self.name,
            self._home,
            arguments.text("a task", task),
            b"",
            b"",
            arguments.text("a claim", claim),
            ask=True,
        )
        reply = await self._ask(asked, m.Given)
        return numbers_of(reply.rows) if reply.granted else None

    async def untake(self, task: str | None = None, numbers: Index | Sequence[int] | None = None) -> None:
        """These rows, or all, are as if the task, or all tasks, had never taken them. Claims of such are forgotten."""
        named = np.empty(0, np.int64) if numbers is None else by_number(numbers)
        request = m.UntakeRows(
            self._connection.next_id(),
            self.name,
            self._home,
            "" if task is None else arguments.text("a task", task),
            named.tobytes(),
            numbers is None,
        )
        await self._ask(request, m.Done)

    async def taken(self, task: str, numbers: Index | Sequence[int] | None = None) -> Flags:
        """Which of these rows, or of all in the order of arrival, the task has taken. Raises Misuse for one that is not
        there."""
        named = np.empty(0, np.int64) if numbers is None else by_number(numbers)
        flags: list[bytes] = []
        more, after = True, -1
        while more:
            asked = m.TakenRows(
                self._connection.next_id(),
                self.name,
                self._home,
                arguments.text("a task", task),
                named.tobytes(),
                numbers is None,
                after,
            )
            reply = await self._ask(asked, m.Taken)
            flags.append(reply.flags)
            more, after = reply.more, reply.last
        return np.frombuffer(b"".join(flags), np.bool_)

    # going

    async def clear(self, rows: Named) -> None:
        """These rows go, with their columns, tags and numbers; each frees what it needed. Those that are not there are
        passed over."""
        keys, numbers = rows_named(rows)
        for start, stop in stretches(len(keys) or len(numbers), keys, []):
            request = m.ClearRows(
                self._connection.next_id(), self.name, self._home, keys[start:stop], numbers[start:stop].tobytes()
            )
            await self._ask(request, m.Done)

    async def drop(self) -> None:
        """All rows go, and who took which. Who writes to the name again makes another table."""
        await self._ask(m.DropTable(self._connection.next_id(), self.name, self._home), m.Done)

    async def _ask(self, request: Any, kind: type[R], wait_s: float = 0.0) -> R:
        reply = await self._connection.request(request, kind, wait_s)
        self._home = getattr(reply, "home", self._home)
        return reply


def _parted(columns: Any) -> tuple[Any, BatchRef | None]:
    """What is to be stored of columns, if anything, and what of them was stored already. Raises SchemaMismatch."""
    if isinstance(columns, BatchRef):
        return None, columns
    refs = _references(columns) if isinstance(columns, Mapping) else []
    if not refs:
        return columns, None
    named = {name: values for name, values in columns.items() if not isinstance(values, BatchRef)}
    return named or None, functools.reduce(BatchRef.union, refs)


def _references(columns: Mapping[str, Any]) -> list[BatchRef]:
    """The columns that were stored already, under their names here."""
    found = []
    for name, values in columns.items():
        if isinstance(values, BatchRef):
            if len(values.columns) != 1:
                found_columns = f"a reference to {len(values.columns)} columns"
                raise SchemaMismatch(
                    f"column {name!r} is {found_columns}: select one", column=name, expected="one", found=found_columns
                )
            found.append(values if values.columns == (name,) else values.rename({values.columns[0]: name}))
    return found


def _check_rows(found: int, count: int) -> None:
    if found != count:
        raise SchemaMismatch(
            f"{found} rows of columns for {count} keys", expected=f"{count} rows", found=f"{found} rows"
        )
