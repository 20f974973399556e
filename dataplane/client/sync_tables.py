"""The synchronous face of tables: each call waits for the asynchronous one's coroutine. It adds no logic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from dataplane.batch.field import Field
from dataplane.batch.narrowing import Narrow
from dataplane.batch.ref import BatchRef
from dataplane.batch.single import Row
from dataplane.client import rowwrites, tables
from dataplane.client.rownames import Named
from dataplane.client.sync_streams import Wait, opened
from dataplane.client.tablerows import Flags, Index, Rows


class Table:
    """See `dataplane.client.tables.AsyncTable`; here each call waits. Any thread may use it."""

    _plane: Any = None

    def __init__(self, inner: tables.AsyncTable, wait: Wait) -> None:
        self._inner = inner
        self._wait = wait

    def __reduce__(self) -> tuple[Any, ...]:
        """As of `Stream`."""
        return opened, (self._inner._connection.address, "table", self.name)

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def name(self) -> str:
        """What it is called."""
        return self._inner.name

    def write(
        self,
        rows: Named,
        columns: Any = None,
        *,
        tags: Sequence[Mapping[str, Any]] | None = None,
        dedupe: Collection[str] = (),
        stored: Callable[[BatchRef], object] | None = None,
        timeout: float = tables.TIMEOUT_S,
        narrow: Narrow = False,
    ) -> Index:
        """Rows with these columns; their numbers. See `AsyncTable.write`."""
        how: dict[str, Any] = {"tags": tags, "dedupe": dedupe, "stored": stored, "timeout": timeout}
        return self._wait(self._inner.write(rows, columns, **how, narrow=narrow))

    def put(
        self,
        rows: Named,
        columns: Any = None,
        *,
        tags: Sequence[Mapping[str, Any]] | None = None,
        dedupe: Collection[str] = (),
        stored: Callable[[BatchRef], object] | None = None,
        timeout: float = tables.TIMEOUT_S,
        narrow: Narrow = False,
    ) -> tuple[Rows, list[str]]:
        """As `write`; what is known of these rows then, and which columns there are. See `AsyncTable.put`."""
        how: dict[str, Any] = {"tags": tags, "dedupe": dedupe, "stored": stored, "timeout": timeout}
        return self._wait(self._inner.put(rows, columns, **how, narrow=narrow))

    def _put_row(self, key: str, row: Row, references: Mapping[str, BatchRef], tags: Any) -> tuple[Rows, list[str]]:
        """A row whose small columns are laid out already. See `client.rowwrites`."""
        return self._wait(rowwrites.put(self._inner, key, row, references, tags))

    def numbers(self, keys: Sequence[str], *, create: bool = False) -> Index:
        """The numbers of the rows of these keys. See `AsyncTable.numbers`."""
        return self._wait(self._inner.numbers(keys, create=create))

    def keys(self, numbers: Index | Sequence[int]) -> list[str]:
        """The keys of these rows. See `AsyncTable.keys`."""
        return self._wait(self._inner.keys(numbers))

    def read(self, rows: Named, columns: Sequence[str] | None = None) -> BatchRef:
        """A reference to these rows, as they are now. See `AsyncTable.read`."""
        return self._wait(self._inner.read(rows, columns))

    def schema(self) -> dict[str, Field]:
        """What each column is, by name."""
        return self._wait(self._inner.schema())

    def look(
        self, rows: Named | None = None, *, columns: Sequence[str] = (), tags: bool = True, since: int = 0
    ) -> Rows:
        """What is known of these rows, or of all. See `AsyncTable.look`."""
        return self._wait(self._inner.look(rows, columns=columns, tags=tags, since=since))

    def ready(
        self,
        columns: Sequence[str],
        *,
        task: str | None = None,
        claim: str | None = None,
        least: int = 1,
        timeout: float = 0.0,
    ) -> Index:
        """The rows that have all these columns and that the task has not taken. See `AsyncTable.ready`."""
        return self._wait(self._inner.ready(columns, task=task, claim=claim, least=least, timeout=timeout))

    def take(
        self,
        task: str,
        numbers: Index | Sequence[int],
        *,
        give: Index | Sequence[int] | None = None,
        claim: str | None = None,
    ) -> Index | None:
        """Mark these rows as taken by the task, all or none. See `AsyncTable.take`."""
        return self._wait(self._inner.take(task, numbers, give=give, claim=claim))

    def claimed(self, task: str, claim: str) -> Index | None:
        """What was given under this claim of the task. See `AsyncTable.claimed`."""
        return self._wait(self._inner.claimed(task, claim))

    def untake(self, task: str | None = None, numbers: Index | Sequence[int] | None = None) -> None:
        """These rows, or all, are as if the task had never taken them. See `AsyncTable.untake`."""
        self._wait(self._inner.untake(task, numbers))

    def taken(self, task: str, numbers: Index | Sequence[int] | None = None) -> Flags:
        """Which of these rows, or of all, the task has taken. See `AsyncTable.taken`."""
        return self._wait(self._inner.taken(task, numbers))

    def clear(self, rows: Named) -> None:
        """These rows go. See `AsyncTable.clear`."""
        self._wait(self._inner.clear(rows))

    def drop(self) -> None:
        """All rows go, and who took which. See `AsyncTable.drop`."""
        self._wait(self._inner.drop())
