"""The synchronous interface of tables: each call waits for the coroutine of the asynchronous one. It adds no logic."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from dataplane.batch.field import Field
from dataplane.batch.put_options import Narrow
from dataplane.batch.ref import BatchRef
from dataplane.batch.small_columns import SmallColumns
from dataplane.client import row_writes, tables
from dataplane.client.row_names import Named
from dataplane.client.sync_streams import Wait, opened
from dataplane.client.table_rows import Flags, Index, Rows


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
        """The name of the table."""
        return self._inner.name

    def upsert(
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
        """Rows with these columns; their numbers. See `AsyncTable.upsert`."""
        how: dict[str, Any] = {"tags": tags, "dedupe": dedupe, "stored": stored, "timeout": timeout}
        return self._wait(self._inner.upsert(rows, columns, **how, narrow=narrow))

    def upsert_and_look(
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
        """As `upsert`. Returns what is known of these rows then, and the columns. See `AsyncTable.upsert_and_look`."""
        how: dict[str, Any] = {"tags": tags, "dedupe": dedupe, "stored": stored, "timeout": timeout}
        return self._wait(self._inner.upsert_and_look(rows, columns, **how, narrow=narrow))

    def _put_row(
        self, key: str, row: SmallColumns, references: Mapping[str, BatchRef], tags: Any
    ) -> tuple[Rows, list[str]]:
        """A row whose small columns are laid out already. See `client.row_writes`."""
        return self._wait(row_writes.put(self._inner, key, row, references, tags))

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
        """The field of each column, by name."""
        return self._wait(self._inner.schema())

    def look(
        self, rows: Named | None = None, *, columns: Sequence[str] = (), tags: bool = True, since: int = 0
    ) -> Rows:
        """Keys, tags and columns of these rows, or of all. See `AsyncTable.look`."""
        return self._wait(self._inner.look(rows, columns=columns, tags=tags, since=since))

    def ready(
        self,
        columns: Sequence[str],
        *,
        task: str | None = None,
        claim_id: str | None = None,
        least: int = 1,
        timeout: float = 0.0,
    ) -> Index:
        """The rows that have all these columns and that the task has not claimed. See `AsyncTable.ready`."""
        return self._wait(self._inner.ready(columns, task=task, claim_id=claim_id, least=least, timeout=timeout))

    def claim(
        self,
        task: str,
        numbers: Index | Sequence[int],
        *,
        give: Index | Sequence[int] | None = None,
        claim_id: str | None = None,
    ) -> Index | None:
        """Mark these rows as claimed by the task, all or none. See `AsyncTable.claim`."""
        return self._wait(self._inner.claim(task, numbers, give=give, claim_id=claim_id))

    def find_claim(self, task: str, claim_id: str) -> Index | None:
        """The rows given under this id. See `AsyncTable.find_claim`."""
        return self._wait(self._inner.find_claim(task, claim_id))

    def release(self, task: str | None = None, numbers: Index | Sequence[int] | None = None) -> None:
        """Undo that the task has claimed these rows, or all. See `AsyncTable.release`."""
        self._wait(self._inner.release(task, numbers))

    def claimed(self, task: str, numbers: Index | Sequence[int] | None = None) -> Flags:
        """Which of these rows, or of all, the task has claimed. See `AsyncTable.claimed`."""
        return self._wait(self._inner.claimed(task, numbers))

    def clear(self, rows: Named) -> None:
        """These rows go. See `AsyncTable.clear`."""
        self._wait(self._inner.clear(rows))

    def drop(self) -> None:
        """Remove all rows and claims. See `AsyncTable.drop`."""
        self._wait(self._inner.drop())
